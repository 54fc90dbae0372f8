// Starts the page: unpacks its data, shows the views, and polls for updates if the page is served.
// A renewed page takes the place of the old one; what the reader has opened, chosen and scrolled to
// stays. Needs browse.js, and the views of what the page holds.

const VIEWS = {
  slots: (box, data, state) => slotsView(box, data, state),
  answers: (box, data, state) => answersView(box, data, state),
};
const SLOWER = 5; // an ended run, or a server that is gone, is asked about less often
const QUIET_MILLISECONDS = 5 * 60 * 1000; // an update may take minutes; a run that was killed is silent for longer

async function unpacked(element) {
  const letters = atob(element.textContent);
  const bytes = new Uint8Array(letters.length);
  for (let place = 0; place < letters.length; place += 1) bytes[place] = letters.charCodeAt(place);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// The data of each view that a document has, by the view's name.
async function viewData(source) {
  const found = {};
  for (const name of Object.keys(VIEWS)) {
    const packed = source.getElementById(name + "-data");
    const box = source.getElementById(name);
    if (!packed || !box) continue;
    if ("DecompressionStream" in window) found[name] = await unpacked(packed);
    else box.append(element("p", "", "This browser is too old to show this section; use a newer one."));
  }
  return found;
}

function showViews(data, states) {
  for (const [name, values] of Object.entries(data)) {
    VIEWS[name](document.getElementById(name), values, states[name]);
  }
}

function headValue(source, name) {
  const found = source.querySelector('meta[name="' + name + '"]');
  return found ? found.content : null;
}

// A time of today, or a day and a time.
function clockTime(moment) {
  const isToday = moment.toDateString() === new Date().toDateString();
  return isToday ? moment.toLocaleTimeString("en-GB") : moment.toLocaleString("en-GB");
}

// Drawers outside the views, which keep their own.
function drawers() {
  const seen = new Map();
  const named = [];
  for (const drawer of document.querySelectorAll("main details")) {
    if (Object.keys(VIEWS).some((name) => drawer.closest("#" + name))) continue;
    const section = drawer.closest("[id]");
    const summary = drawer.querySelector("summary");
    const title = (section ? section.id : "") + " " + (summary ? summary.textContent : "");
    const words = title.replace(/[0-9][0-9.,]*/g, "#"); // numbers change from page to page
    seen.set(words, (seen.get(words) || 0) + 1);
    named.push([words + " " + seen.get(words), drawer]);
  }
  return named;
}

// Where an element stands in the page: the way down from <main>, as the number of each child.
function wayTo(element) {
  const way = [];
  for (let at = element; at && at.localName !== "main"; at = at.parentElement) {
    if (!at.parentElement) return null;
    way.unshift([...at.parentElement.children].indexOf(at));
  }
  return way;
}

function atTheEndOf(way) {
  return way.reduce((at, number) => at && at.children[number], document.querySelector("main"));
}

// What the reader looks at, and how far down the window it stands: what has the focus, or else the
// part of the page at the top of the window.
function lookedAt(focused) {
  const top = focused ? focused.getBoundingClientRect().top : -1;
  if (top >= 0 && top < window.innerHeight) return { id: null, top };
  const parts = [...document.querySelectorAll("main section[id]")];
  const part = parts.filter((one) => one.getBoundingClientRect().top <= 0).pop();
  return part ? { id: part.id, top: part.getBoundingClientRect().top } : null;
}

function scrollBack({ scroll, seen }) {
  const found = seen && (seen.id ? document.getElementById(seen.id) : focusedInside());
  const top = found ? window.scrollY + found.getBoundingClientRect().top - seen.top : scroll[1];
  window.scrollTo({ left: scroll[0], top, behavior: "instant" });
}

function focusedInside() {
  const focused = document.activeElement;
  return focused && focused.closest("main") ? focused : null;
}

function placeOfReader() {
  const focused = focusedInside();
  const boxes = [...document.querySelectorAll("main .scroll")].filter((box) => box.scrollLeft > 0);
  return {
    scroll: [window.scrollX, window.scrollY],
    seen: lookedAt(focused),
    boxes: boxes.map((box) => [wayTo(box), box.scrollLeft]),
    open: new Map(drawers().map(([name, drawer]) => [name, drawer.open])),
    focus: focused ? { id: focused.id, name: focused.localName, way: wayTo(focused), marked: marked(focused) } : null,
  };
}

// The marked part of a text field; other elements have none.
function marked(field) {
  const isText = field.localName === "textarea" || (field.localName === "input" && field.selectionStart !== null);
  return isText ? [field.selectionStart, field.selectionEnd] : null;
}

function takeBack(place) {
  for (const [name, drawer] of drawers()) {
    if (place.open.has(name)) drawer.open = place.open.get(name);
  }
  for (const [way, left] of place.boxes) {
    const box = atTheEndOf(way);
    if (box) box.scrollLeft = left;
  }
  // A view may have put the focus back itself.
  if (place.focus && !focusedInside()) focusAgain(place.focus);
  scrollBack(place);
  // Views may get their height only when they are laid out.
  requestAnimationFrame(() => requestAnimationFrame(() => scrollBack(place)));
}

function focusAgain(focus) {
  const found = (focus.id && document.getElementById(focus.id)) || atTheEndOf(focus.way);
  if (!found || found.localName !== focus.name) return;
  found.focus({ preventScroll: true });
  if (focus.marked && marked(found)) found.setSelectionRange(...focus.marked);
}

// Whether a page has the style and the script of this one, which its policy names; only then can it
// take this one's place.
function isAlike(text) {
  const [head] = text.split("<title>", 1);
  return head.includes(document.querySelector("meta[http-equiv]").content);
}

// What the server answers; null where nobody does.
async function fetched(path) {
  try {
    const reply = await fetch(path, { cache: "no-store" });
    return reply.ok ? await reply.text() : null;
  } catch {
    return null;
  }
}

function exchange(fresh, what) {
  const [mine, other] = [document, fresh].map((source) => source.querySelector(what));
  if (mine && other) mine.replaceWith(document.adoptNode(other));
  else if (other) document.body.append(document.adoptNode(other));
  else if (mine) mine.remove();
}

// Put the newest page in the place of this one; false where the server is gone.
async function renew(states) {
  const text = await fetched("/");
  if (text === null) return false;
  if (!isAlike(text)) {
    location.reload();
    return true;
  }
  const fresh = new DOMParser().parseFromString(text, "text/html");
  // Everything slow comes first, so that the reader sees one change and no gap.
  const data = await viewData(fresh);
  const place = placeOfReader();
  document.title = fresh.title;
  const packed = Object.keys(VIEWS).map((name) => "#" + name + "-data");
  for (const what of ['meta[name="sortedrl-version"]', "main", ...packed]) exchange(fresh, what);
  showViews(data, states);
  takeBack(place);
  return true;
}

function statusLine() {
  const main = element("strong", "");
  const rest = element("span", "");
  const line = element("div", "watch", element("p", "", element("span", "watch-mark"), main, rest));
  main.setAttribute("role", "status");
  document.body.prepend(line);
  return (condition, said, more) => {
    line.className = "watch " + condition;
    // The same words again would be read out again.
    if (main.textContent !== said) main.textContent = said;
    rest.textContent = more;
  };
}

// Whether a change would now take something out of the reader's hands.
function busyReader() {
  let isHeld = false;
  document.addEventListener("pointerdown", () => { isHeld = true; });
  for (const name of ["pointerup", "pointercancel", "dragend", "blur"]) {
    window.addEventListener(name, () => { isHeld = false; });
  }
  return () => {
    const chosen = document.getSelection();
    const isMarked = chosen && !chosen.isCollapsed && document.querySelector("main").contains(chosen.anchorNode);
    return isHeld || isMarked;
  };
}

function sayState(say, state) {
  const [what, is, has] = state.runs > 1 ? ["runs", "are", "have"] : ["run", "is", "has"];
  if (state.seconds === null) {
    say("is-quiet", "Waiting for the " + what, "; last checked at " + clockTime(new Date()) + ".");
    return;
  }
  const written = new Date(1000 * state.written);
  const notes = state.notes.map((note) => " " + visible(note) + ".").join("");
  const rest = ", " + Math.round(state.seconds).toLocaleString("en") + " s of training, last written at " + clockTime(written) + "." + notes;
  if (state.ended) say("is-quiet", "The " + what + " " + has + " finished", rest);
  else if (Date.now() - written > QUIET_MILLISECONDS) say("is-quiet", "No new data for a while", rest);
  else say(notes ? "has-notes" : "", "The " + what + " " + is + " in progress", rest);
}

function watchServer(seconds, states) {
  const say = statusLine();
  const isBusy = busyReader();
  let asked = new Date();
  let timer = 0;
  let isAsking = false;

  function lost() {
    say("is-lost", "The server has stopped", "; the page shows the run at " + clockTime(asked) + ".");
    return SLOWER;
  }

  // Ask once; what it gives is how much later than usual to ask again.
  async function ask() {
    const text = await fetched("/state");
    if (text === null) return lost();
    const state = JSON.parse(text);
    const isNew = state.version !== headValue(document, "sortedrl-version");
    if (isNew && isBusy()) {
      say("", "New data is available", "; it is shown once you release the mouse or the selection.");
      return 1;
    }
    if (isNew && !(await renew(states))) return lost();
    asked = new Date();
    sayState(say, state);
    return state.ended ? SLOWER : 1;
  }

  async function askAgain() {
    if (isAsking) return;
    isAsking = true;
    clearTimeout(timer);
    let pace = SLOWER;
    try {
      if (!document.hidden) pace = await ask();
    } finally {
      isAsking = false;
      timer = setTimeout(askAgain, 1000 * seconds * pace);
    }
  }

  document.addEventListener("visibilitychange", askAgain);
  askAgain();
}

async function startPage() {
  const states = Object.fromEntries(Object.keys(VIEWS).map((name) => [name, {}]));
  showViews(await viewData(document), states);
  const seconds = Number(headValue(document, "sortedrl-refresh"));
  if (seconds > 0) watchServer(seconds, states);
}

startPage();
