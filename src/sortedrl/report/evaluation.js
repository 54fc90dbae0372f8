"use strict";
// Shows the answers of an evaluation. Everything from the data becomes a text node, never markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const GIST = 140;

  function element(name, css, ...children) {
    const made = document.createElement(name);
    if (css) made.className = css;
    made.append(...children);
    return made;
  }

  function whole(text) {
    return typeof text === "string" ? text : text[0] + "\n" + text[2];
  }

  function block(text) {
    const made = element("pre", "text");
    made.tabIndex = 0;
    if (typeof text === "string") {
      made.append(text);
    } else {
      const words = text[1].toLocaleString("en") + " characters left out";
      made.append(text[0], element("span", "left-out", words), text[2]);
    }
    return made;
  }

  function verdict(answer) {
    if (answer.failure) return element("span", "verdict is-wrong", "no verdict");
    return answer.right
      ? element("span", "verdict is-right", "✓ right")
      : element("span", "verdict is-wrong", "✗ wrong");
  }

  function place(prompt) {
    const isNumber = /^[0-9]+[.]?[0-9]*$/.test(prompt.level);
    const level = prompt.level === null ? "" : (isNumber ? ", level " : ", ") + prompt.level;
    return prompt.task + " " + prompt.id + level;
  }

  function facts(answer) {
    const facts = [answer.tokens.toLocaleString("en") + " tokens"];
    if (answer.truncated) facts.push("truncated");
    if (answer.failure) facts.push(answer.failure);
    return facts.join(", ");
  }

  function scores(answer) {
    const list = element("dl");
    const entries = [["reward", answer.reward], ...Object.entries(answer.parts)];
    for (const [name, value] of entries) {
      const words = value === null ? "none" : String(Number(value.toFixed(4)));
      list.append(element("dt", "", name), element("dd", "", words));
    }
    return list;
  }

  function asked(prompt) {
    const parts = [element("h4", "", "question"), block(prompt.question)];
    if (prompt.gold !== null) parts.push(element("h4", "", "gold answer"), block(prompt.gold));
    return parts;
  }

  function said(answer, heading) {
    return [element("h4", "", heading), block(answer.response), element("h4", "", "score"), scores(answer)];
  }

  function gist(prompt) {
    return element("span", "gist", whole(prompt.question).slice(0, GIST).replace(/\s+/g, " "));
  }

  function drawer(head, fill) {
    const made = element("details", "", head);
    made.addEventListener("toggle", () => made.append(fill()), { once: true });
    return made;
  }

  function answerItem(answer) {
    const prompt = data.prompts[answer.prompt];
    const name = data.labels.length > 1 ? data.labels[answer.model] + ", " : "";
    const meta = name + place(prompt) + ", answer " + answer.sample + ", " + facts(answer);
    const head = element("summary", "", verdict(answer), gist(prompt), element("span", "meta", meta));
    return drawer(head, () => element("div", "inside", ...asked(prompt), ...said(answer, "answer")));
  }

  function share(value) {
    return Math.round(100 * value) + " %";
  }

  function flipItem(flip) {
    const prompt = data.prompts[flip.prompt];
    const gain = flip.after > flip.before;
    const way = element("span", gain ? "verdict is-right" : "verdict is-wrong", gain ? "✓ to right" : "✗ to wrong");
    const meta = place(prompt) + ", " + share(flip.before) + " → " + share(flip.after) + " right";
    const head = element("summary", "", way, gist(prompt), element("span", "meta", meta));
    return drawer(head, () => {
      const sides = flip.answers.map((number) => {
        const answer = data.answers[number];
        const side = element("div", "");
        side.append(...said(answer, data.labels[answer.model] + ": " + (answer.right ? "right, " : "wrong, ") + facts(answer)));
        return side;
      });
      return element("div", "inside", ...asked(prompt), element("div", "sides", ...sides));
    });
  }

  // A list that grows by a page at a time.
  function listing(box, button, item, size) {
    let items = [];
    let shown = 0;
    function grow() {
      box.append(...items.slice(shown, shown + size).map(item));
      shown = Math.min(shown + size, items.length);
      button.hidden = shown === items.length;
      button.textContent = "show " + Math.min(size, items.length - shown) + " more of " + items.length.toLocaleString("en");
    }
    button.addEventListener("click", grow);
    return (chosen) => {
      items = chosen;
      shown = 0;
      box.replaceChildren();
      grow();
    };
  }

  function choices(select, names) {
    const kept = select.value;
    select.replaceChildren(select.options[0], ...names.map((name) => new Option(name, name)));
    select.value = names.includes(kept) ? kept : "";
  }

  function fits(answer, wanted) {
    const prompt = data.prompts[answer.prompt];
    if (wanted.model && answer.model !== Number(wanted.model)) return false;
    if (wanted.task && prompt.task !== wanted.task) return false;
    if (wanted.level && prompt.level !== wanted.level) return false;
    if (wanted.verdict === "right" && !answer.right) return false;
    if (wanted.verdict === "wrong" && answer.right) return false;
    if (wanted.verdict === "truncated" && !answer.truncated) return false;
    if (wanted.verdict === "failure" && !answer.failure) return false;
    if (wanted.least && answer.tokens < Number(wanted.least)) return false;
    if (wanted.most && answer.tokens > Number(wanted.most)) return false;
    if (!wanted.words) return true;
    const texts = [prompt.question, prompt.gold || "", answer.response].map(whole);
    return texts.some((text) => text.toLowerCase().includes(wanted.words));
  }

  function watch(form, show) {
    form.addEventListener("input", show);
    form.addEventListener("submit", (event) => event.preventDefault());
    show();
  }

  const filters = document.getElementById("filters");
  const count = document.getElementById("count");
  const list = listing(document.getElementById("answers"), document.getElementById("more"), answerItem, 25);
  choices(filters.elements.task, Object.keys(data.tasks));
  watch(filters, () => {
    const task = filters.elements.task.value;
    const levels = task ? data.tasks[task] : Object.values(data.tasks).flat();
    choices(filters.elements.level, [...new Set(levels)]);
    const wanted = Object.fromEntries(new FormData(filters));
    wanted.words = wanted.words.trim().toLowerCase();
    const found = data.answers.filter((answer) => fits(answer, wanted));
    if (wanted.order === "short") found.sort((a, b) => a.tokens - b.tokens);
    if (wanted.order === "long") found.sort((a, b) => b.tokens - a.tokens);
    count.textContent = found.length.toLocaleString("en") + (found.length === 1 ? " answer" : " answers");
    list(found);
  });

  const flips = document.getElementById("flips");
  if (flips) {
    const form = document.getElementById("flip-filters");
    const show = listing(flips, document.getElementById("more-flips"), flipItem, 10);
    watch(form, () => {
      const way = form.elements.way.value;
      show(data.flips.filter((flip) => !way || (way === "gain") === flip.after > flip.before));
    });
  }
})();
