// Draws what every slot did, bar by bar or, where there are too many, as shares; needs browse.js.
// All panels show the same seconds: state.from to state.to since each run's start, or everything;
// and the same part of the slots: state.low to state.high, as shares of them.

const SLOTS_MOST_BARS = 15000;
const SLOTS_BINS = 32768;
const SLOTS_STEPS = 6;
const SLOTS_HEAD = 17;
const SLOTS_CHOICES = [
  ["outcome", "by outcome"],
  ["length", "by length of the answer"],
  ["reward", "by reward"],
  ["age", "by staleness"],
];
const SLOTS_BANDS = ["idle", "update", "hand-over"];

function slotsView(box, data, state) {
  if (state.cleanup) state.cleanup();
  const control = new AbortController();
  const runs = data.runs.map(slotsRun);
  const view = {
    box, runs, state,
    signal: control.signal,
    total: Math.max(...runs.map((run) => run.seconds)) || 1,
    least: 50 * Math.max(...runs.map((run) => run.tick)),
    pointed: null,
    frame: 0,
  };
  state.low ??= 0;
  state.high ??= 1;
  state.colour ||= "outcome";
  slotsBuild(view);
  slotsRecolour(view);
  if (state.from !== undefined) slotsMove(view, state.from, state.to);
  slotsKeepFocus(view);
  const sizes = new ResizeObserver(() => slotsLayout(view));
  sizes.observe(view.root);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", () => slotsRecolour(view), { signal: view.signal });
  state.cleanup = () => {
    control.abort();
    sizes.disconnect();
    cancelAnimationFrame(view.frame);
  };
}

function slotsButton(text, label, act) {
  const made = element("button", "", text);
  made.type = "button";
  made.setAttribute("aria-label", label);
  made.title = label;
  made.addEventListener("click", act);
  return made;
}

function slotsColourChoice(view) {
  const select = element("select");
  for (const [value, text] of SLOTS_CHOICES) {
    if (value !== "reward" || view.runs.some((run) => run.reward.some((reward) => !Number.isNaN(reward)))) select.append(new Option(text, value));
  }
  select.value = view.state.colour;
  if (!select.value) select.value = view.state.colour = "outcome";
  select.addEventListener("change", () => {
    view.state.colour = select.value;
    slotsRecolour(view);
  });
  return element("label", "", "Colours", select);
}

function slotsPanel(run, place) {
  const lanes = element("canvas", "slots-lanes");
  lanes.tabIndex = 0;
  lanes.setAttribute("role", "application");
  lanes.setAttribute("aria-label", "Slot timeline of " + visible(run.name) + ". Plus and minus zoom, 0 shows everything, arrows move, shift and arrows go from bar to bar.");
  const mark = element("canvas", "slots-mark");
  mark.setAttribute("aria-hidden", "true");
  return { run, place, lanes, mark, height: 0, bins: null };
}

function slotsBuild(view) {
  const { runs } = view;
  view.panels = runs.map(slotsPanel);
  view.buttons = {
    in: slotsButton("+", "zoom in", () => slotsZoom(view, 2)),
    out: slotsButton("\u2212", "zoom out", () => slotsZoom(view, 0.5)),
    whole: slotsButton("whole run", "show the whole run", () => slotsWhole(view)),
    fewer: slotsButton("fewer slots", "show fewer slots, each taller", () => slotsZoomSlots(view, 2)),
    more: slotsButton("more slots", "show more slots", () => slotsZoomSlots(view, 0.5)),
  };
  view.slotButtons = element("div", "slots-buttons", view.buttons.fewer, view.buttons.more);
  view.summary = element("p", "slots-summary");
  view.strip = element("canvas");
  view.pane = element("div", "slots-window");
  view.whole = element("div", "slots-whole", view.strip, view.pane);
  view.whole.title = "the whole run: drag to choose what is shown below";
  view.axis = element("canvas", "slots-axis");
  view.key = element("ul", "key slots-key");
  view.tip = element("div", "slots-tip");
  view.tip.setAttribute("aria-live", "polite");
  const hint = element("p", "slots-hint", "Drag to move; zoom by double click, by ", element("kbd", "", "ctrl"), " and the wheel, or by ", element("kbd", "", "shift"), " and dragging. ",
    "From the keyboard: ", element("kbd", "", "+"), " ", element("kbd", "", "\u2212"), " ", element("kbd", "", "0"), " and arrows; with ", element("kbd", "", "shift"), ", arrows go from bar to bar.");
  view.root = view.box.querySelector(".slots-box");
  view.root.replaceChildren(
    element("div", "slots-bar", element("div", "slots-buttons", view.buttons.in, view.buttons.out, view.buttons.whole), view.slotButtons, slotsColourChoice(view)),
    view.summary, view.whole,
    ...view.panels.flatMap(({ run, lanes, mark }) => [
      element("div", "slots-title", element("strong", "", visible(run.name)), element("span", "", visible(run.subtitle))),
      element("div", "slots-panel", lanes, mark),
    ]),
    view.axis, view.key, hint, view.tip,
  );
  view.panels.forEach((panel) => slotsPointers(view, panel));
  slotsStrip(view);
}

// Restores the focus after the page was renewed.
function slotsKeepFocus(view) {
  const controls = [...view.root.querySelectorAll("button, select, .slots-lanes")];
  if (view.state.focused >= 0 && document.activeElement === document.body) controls[view.state.focused]?.focus({ preventScroll: true });
  const note = (event) => { view.state.focused = controls.indexOf(event.target); };
  // a control that is taken out of the page loses the focus too, but to nothing
  document.addEventListener("focusin", note, { signal: view.signal });
  document.addEventListener("pointerdown", note, { signal: view.signal });
}

function slotsRecolour(view) {
  if (view.coloured !== view.state.colour) {
    view.colours = slotsClasses(view.runs, view.state.colour);
    view.coloured = view.state.colour;
    view.panels.forEach((panel) => { panel.bins = null; });
    slotsLegend(view);
  }
  view.look = slotsLook(view);
  slotsLayout(view);
}

function slotsLayout(view) {
  const width = view.root.clientWidth;
  if (!width) return;
  view.width = width;
  const most = view.runs.length > 1 ? Math.max(110, 560 / view.runs.length) : 340;
  for (const panel of view.panels) {
    // a pixel at least for each slot, while that is not too tall
    const room = Math.max(most, Math.min(1.25 * panel.run.slots, 260));
    panel.height = Math.round(Math.max(40, Math.min(13 * panel.run.slots, room)));
  }
  view.slotButtons.hidden = view.panels.every((panel) => panel.height / panel.run.slots >= 5);
  slotsDrawWhole(view);
  slotsSchedule(view);
}
