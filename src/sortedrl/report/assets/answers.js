// Shows the answers that a run kept as text; needs browse.js.

function answersView(section, data, state) {
  const form = section.querySelector("form");
  const status = section.querySelector("[role=status]");
  state.list ||= {};
  state.open ||= [];
  const answers = data.update.map((_, place) => loggedAnswer(data, place));
  const starts = data.runs.map((_, run) => commonStart(answers, run));
  const item = (answer) => loggedItem(data, answer, starts[answer.run], state);
  const list = listing(section.querySelector(".listing"), section.querySelector("button"), item, 25, state.list);
  restoreFilters(form, state);
  watchForm(form, () => {
    state.filters = Object.fromEntries(new FormData(form));
    const found = chosenAnswers(answers, state.filters);
    status.textContent = counted(found.length, "answer");
    list(found);
  });
}

// An answer as an object, from the columns.
function loggedAnswer(data, place) {
  const answer = { place, question: data.questions[data.question[place]], parts: data.parts[place] };
  for (const name of ["run", "update", "prompt", "sample", "group", "oldest", "newest", "tokens", "truncated", "reward", "response"]) {
    answer[name] = data[name][place];
  }
  answer.key = [answer.run, answer.update, answer.prompt, answer.sample].join("/");
  return answer;
}

// What more than half of a run's questions open with, in whole sentences or lines, such as a
// system prompt: gists leave it out.
function commonStart(answers, run) {
  const texts = [...new Set(answers.filter((answer) => answer.run === run).map((answer) => whole(answer.question)))];
  if (texts.length < 2) return "";
  const half = Math.floor(texts.length / 2);
  const middle = texts.sort()[half];
  const shared = texts.map((text) => sharedLength(text, middle)).sort((a, b) => b - a);
  const start = middle.slice(0, shared[half]);
  return start.slice(0, Math.max(start.lastIndexOf("\n"), start.lastIndexOf(". ") + 1) + 1);
}

function sharedLength(one, other) {
  let length = 0;
  while (length < one.length && one[length] === other[length]) length += 1;
  return length;
}

function loggedItem(data, answer, start, state) {
  const question = whole(answer.question);
  const text = start && question.startsWith(start) ? "… " + question.slice(start.length).trim() : question;
  const reward = element("span", "verdict", answer.reward === null ? "no reward" : "reward " + decimal(answer.reward));
  const words = ["update " + answer.update.toLocaleString("en"), counted(answer.tokens, "token")];
  if (answer.truncated) words.push("truncated");
  const meta = element("span", "meta", words.join(", "));
  if (data.runs.length > 1) {
    meta.prepend(element("span", "swatch series" + (answer.run % data.colours)), visible(data.runs[answer.run]) + ", ");
  }
  const head = element("summary", "", reward, gist(text), meta);
  const made = drawer(head, () => loggedInside(answer), state.open.includes(answer.key));
  made.addEventListener("toggle", () => {
    state.open = state.open.filter((key) => key !== answer.key);
    if (made.open) state.open.push(answer.key);
  });
  return made;
}

function loggedInside(answer) {
  const versions = answer.oldest === answer.newest ? String(answer.oldest) : answer.oldest + " to " + answer.newest;
  const length = counted(answer.tokens, "token") + (answer.truncated ? ", truncated" : "");
  const entries = [
    ["reward", decimal(answer.reward)],
    ...Object.entries(answer.parts).map(([name, value]) => ["— " + name, decimal(value)]),
    ["length", length],
    ["written by version", versions],
    ["trained on in update", answer.update.toLocaleString("en")],
    ["prompt", answer.prompt + " of group " + answer.group + ", answer " + answer.sample],
  ];
  return element(
    "div", "inside",
    element("h4", "", "question"), block(answer.question),
    element("h4", "", "answer"), block(answer.response),
    element("h4", "", "about it"), facts(entries),
  );
}

function isBetween(value, least, most) {
  if (least && (value === null || value < Number(least))) return false;
  return !most || (value !== null && value <= Number(most));
}

function chosenAnswers(answers, filters) {
  const words = filters.words.trim().toLowerCase();
  const found = answers.filter((answer) => {
    if (filters.run && answer.run !== Number(filters.run)) return false;
    if (filters.truncated && !answer.truncated) return false;
    return isBetween(answer.reward, filters.reward_least, filters.reward_most)
      && isBetween(answer.tokens, filters.tokens_least, filters.tokens_most)
      && isBetween(answer.update, filters.update_least, filters.update_most)
      && (!words || includesWords([answer.question, answer.response], words));
  });
  const [name, way] = filters.order.split(" ");
  const sign = way === "down" ? -1 : 1;
  return found.sort((a, b) => missingLast(a[name], b[name]) || sign * (a[name] - b[name]) || a.place - b.place);
}

function missingLast(one, other) {
  return (one === null) - (other === null);
}

function restoreFilters(form, state) {
  for (const [name, value] of Object.entries(state.filters || {})) {
    const control = form.elements[name];
    if (!control) continue;
    if (control.type === "checkbox") control.checked = true;
    else control.value = value;
    // a choice that is gone leaves the control empty, which no option stands for
    if (control.selectedIndex === -1) control.selectedIndex = 0;
  }
}
