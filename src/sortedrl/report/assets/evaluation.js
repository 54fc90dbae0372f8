// Shows the answers of an evaluation; needs browse.js.

function verdict(answer) {
  if (answer.failure) return element("span", "verdict is-wrong", "no verdict");
  return answer.right
    ? element("span", "verdict is-right", "✓ right")
    : element("span", "verdict is-wrong", "✗ wrong");
}

function place(prompt) {
  const isNumber = /^[0-9]+[.]?[0-9]*$/.test(prompt.level);
  const level = prompt.level === null ? "" : (isNumber ? ", level " : ", ") + prompt.level;
  return visible(prompt.task + " " + prompt.id + level);
}

function lengthWords(answer) {
  const words = [answer.tokens.toLocaleString("en") + " tokens"];
  if (answer.truncated) words.push("truncated");
  if (answer.failure) words.push(visible(answer.failure));
  return words.join(", ");
}

function asked(prompt) {
  const parts = [element("h4", "", "question"), block(prompt.question)];
  if (prompt.gold !== null) parts.push(element("h4", "", "gold answer"), block(prompt.gold));
  return parts;
}

function said(answer, heading) {
  const scores = [["reward", answer.reward], ...Object.entries(answer.parts)];
  const list = facts(scores.map(([name, value]) => [name, decimal(value)]));
  return [element("h4", "", heading), block(answer.response), element("h4", "", "score"), list];
}

function answerItem(data, answer) {
  const prompt = data.prompts[answer.prompt];
  const name = data.labels.length > 1 ? visible(data.labels[answer.model]) + ", " : "";
  const meta = name + place(prompt) + ", answer " + answer.sample + ", " + lengthWords(answer);
  const head = element("summary", "", verdict(answer), gist(whole(prompt.question)), element("span", "meta", meta));
  return drawer(head, () => element("div", "inside", ...asked(prompt), ...said(answer, "answer")));
}

function share(value) {
  return Math.round(100 * value) + " %";
}

function flipItem(data, flip) {
  const prompt = data.prompts[flip.prompt];
  const gain = flip.after > flip.before;
  const way = element("span", gain ? "verdict is-right" : "verdict is-wrong", gain ? "✓ to right" : "✗ to wrong");
  const meta = place(prompt) + ", " + share(flip.before) + " → " + share(flip.after) + " right";
  const head = element("summary", "", way, gist(whole(prompt.question)), element("span", "meta", meta));
  return drawer(head, () => {
    const sides = flip.answers.map((number) => {
      const answer = data.answers[number];
      const heading = visible(data.labels[answer.model]) + ": " + (answer.right ? "right, " : "wrong, ") + lengthWords(answer);
      return element("div", "", ...said(answer, heading));
    });
    return element("div", "inside", ...asked(prompt), element("div", "sides", ...sides));
  });
}

function choices(select, names) {
  const kept = select.value;
  select.replaceChildren(select.options[0], ...names.map((name) => new Option(visible(name), name)));
  select.value = names.includes(kept) ? kept : "";
}

function fits(data, answer, wanted) {
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
  return !wanted.words || includesWords([prompt.question, prompt.gold || "", answer.response], wanted.words);
}

function browseAnswers(data) {
  const filters = document.getElementById("filters");
  const count = document.getElementById("count");
  const list = listing(document.getElementById("answers"), document.getElementById("more"), (answer) => answerItem(data, answer), 25);
  choices(filters.elements.task, Object.keys(data.tasks));
  watchForm(filters, () => {
    const task = filters.elements.task.value;
    const levels = task ? data.tasks[task] : Object.values(data.tasks).flat();
    choices(filters.elements.level, [...new Set(levels)]);
    const wanted = Object.fromEntries(new FormData(filters));
    wanted.words = wanted.words.trim().toLowerCase();
    const found = data.answers.filter((answer) => fits(data, answer, wanted));
    if (wanted.order === "short") found.sort((a, b) => a.tokens - b.tokens);
    if (wanted.order === "long") found.sort((a, b) => b.tokens - a.tokens);
    count.textContent = counted(found.length, "answer");
    list(found);
  });
}

function browseFlips(data) {
  const form = document.getElementById("flip-filters");
  const show = listing(document.getElementById("flips"), document.getElementById("more-flips"), (flip) => flipItem(data, flip), 10);
  watchForm(form, () => {
    const way = form.elements.way.value;
    show(data.flips.filter((flip) => !way || (way === "gain") === flip.after > flip.before));
  });
}

function evaluationView(data) {
  browseAnswers(data);
  if (document.getElementById("flips")) browseFlips(data);
}

evaluationView(JSON.parse(document.getElementById("data").textContent));
