// Zooms and moves the slot timeline: keys, wheel, mouse, fingers, the strip of the whole run.

function slotsMove(view, from, to) {
  const width = Math.min(view.total, Math.max(view.least, to - from));
  const middle = (from + to) / 2;
  const left = Math.min(view.total - width, Math.max(0, to - from === width ? from : middle - width / 2));
  const isWhole = width >= view.total * (1 - 1e-9);
  view.state.from = isWhole ? undefined : left;
  view.state.to = isWhole ? undefined : left + width;
  slotsSchedule(view);
}

// Larger by `factor` around a second, which stays where it is on the screen.
function slotsZoom(view, factor, seconds) {
  const [from, to] = slotsWindow(view);
  const middle = seconds ?? (from + to) / 2;
  slotsUnpoint(view);
  const width = Math.max(view.least, (to - from) / factor);
  const left = middle - ((middle - from) / (to - from)) * width;
  slotsMove(view, left, left + width);
}

function slotsZoomSlots(view, factor, share) {
  const { low, high } = view.state;
  const least = Math.min(1, 4 / Math.max(...view.runs.map((run) => run.slots)));
  const width = Math.min(1, Math.max(least, (high - low) / factor));
  const middle = share ?? (low + high) / 2;
  slotsUnpoint(view);
  slotsMoveSlots(view, middle - ((middle - low) / (high - low)) * width, width);
}

function slotsMoveSlots(view, low, width) {
  view.state.low = Math.min(1 - width, Math.max(0, low));
  view.state.high = view.state.low + width;
  slotsSchedule(view);
}

function slotsWhole(view) {
  slotsUnpoint(view);
  Object.assign(view.state, { from: undefined, to: undefined, low: 0, high: 1 });
  slotsSchedule(view);
}

function slotsKey(view, panel, event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const [from, to] = slotsWindow(view);
  const shift = 0.2 * (to - from);
  const { low, high } = view.state;
  const walk = { ArrowLeft: { along: -1, across: 0 }, ArrowRight: { along: 1, across: 0 }, ArrowUp: { along: 0, across: -1 }, ArrowDown: { along: 0, across: 1 } };
  const acts = {
    ArrowLeft: () => slotsMove(view, from - shift, to - shift),
    ArrowRight: () => slotsMove(view, from + shift, to + shift),
    "+": () => slotsZoom(view, 2),
    "=": () => slotsZoom(view, 2),
    "-": () => slotsZoom(view, 0.5),
    0: () => slotsWhole(view),
    Escape: () => slotsUnpoint(view),
  };
  if (high - low < 1) {
    acts.ArrowUp = () => slotsMoveSlots(view, low - 0.2 * (high - low), high - low);
    acts.ArrowDown = () => slotsMoveSlots(view, low + 0.2 * (high - low), high - low);
  }
  const act = event.shiftKey && walk[event.key] ? () => slotsWalk(view, panel, walk[event.key]) : acts[event.key];
  if (!act) return;
  event.preventDefault();
  act();
}

function slotsWheel(view, panel, event) {
  const place = slotsLocate(view, panel, event);
  const factor = 2 ** (-event.deltaY / (event.deltaMode === 1 ? 6 : 200));
  if (event.ctrlKey || event.metaKey) {
    slotsZoom(view, factor, place.seconds);
  } else if (event.altKey) {
    slotsZoomSlots(view, factor, view.state.low + (place.y / panel.height) * (view.state.high - view.state.low));
  } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    const [from, to] = slotsWindow(view);
    const shift = (event.deltaX / view.width) * (to - from);
    slotsUnpoint(view);
    slotsMove(view, from + shift, to + shift);
  } else {
    return;
  }
  event.preventDefault();
}

// Drag moves, shift and drag marks what to zoom to, two fingers zoom, a tap points.
function slotsPointers(view, panel) {
  const fingers = new Map();
  let held = null;
  const listen = (name, act) => panel.lanes.addEventListener(name, act);
  listen("pointerdown", (event) => {
    if (event.button) return;
    fingers.set(event.pointerId, slotsLocate(view, panel, event));
    held = { window: slotsWindow(view), ...view.state, ...slotsLocate(view, panel, event), isMarking: event.shiftKey, isMoved: false };
  });
  listen("pointermove", (event) => {
    if (!held) {
      slotsPoint(view, panel, event);
      return;
    }
    if (!fingers.has(event.pointerId)) return;
    const place = slotsLocate(view, panel, event);
    if (fingers.size === 2) {
      slotsPinch(view, fingers, event.pointerId, place.x);
      held.isMoved = true;
      return;
    }
    if (!held.isMoved && Math.hypot(place.x - held.x, place.y - held.y) < 4) return;
    if (!held.isMoved) {
      held.isMoved = true;
      panel.lanes.setPointerCapture(event.pointerId);
      slotsUnpoint(view);
    }
    if (held.isMarking) {
      view.marked = [Math.min(held.seconds, place.seconds), Math.max(held.seconds, place.seconds)];
      slotsDrawMarks(view);
    } else {
      slotsDrag(view, panel, held, place);
    }
  });
  const release = (event) => {
    fingers.delete(event.pointerId);
    const { marked } = view;
    view.marked = null;
    if (marked && event.type === "pointerup") slotsMove(view, ...marked);
    if (held && !held.isMoved && event.type === "pointerup") slotsPoint(view, panel, event);
    if (!fingers.size) held = null;
  };
  listen("pointerup", release);
  listen("pointercancel", release);
  listen("pointerleave", (event) => { if (!held && event.pointerType === "mouse") slotsUnpoint(view); });
  listen("dblclick", (event) => slotsZoom(view, 3, slotsLocate(view, panel, event).seconds));
  listen("keydown", (event) => slotsKey(view, panel, event));
  listen("blur", () => slotsUnpoint(view));
  panel.lanes.addEventListener("wheel", (event) => slotsWheel(view, panel, event), { passive: false });
}

function slotsDrag(view, panel, held, place) {
  const [from, to] = held.window;
  const shift = ((held.x - place.x) / view.width) * (to - from);
  slotsMove(view, from + shift, to + shift);
  const width = held.high - held.low;
  if (width < 1) slotsMoveSlots(view, held.low + ((held.y - place.y) / panel.height) * width, width);
}

// The seconds under two fingers stay under them.
function slotsPinch(view, fingers, moved, x) {
  const place = fingers.get(moved);
  const [, other] = [...fingers].find(([id]) => id !== moved);
  const apart = x - other.x;
  if (Math.abs(apart) < 10) return;
  const span = ((place.seconds - other.seconds) / apart) * view.width;
  if (!(span > 0)) return;
  place.x = x;
  const from = other.seconds - (other.x / view.width) * span;
  slotsMove(view, from, from + span);
}

// The strip of the whole run: its edges resize the window, its inside moves it, elsewhere makes one.
function slotsStrip(view) {
  let held = null;
  const secondsAt = (event) => {
    const area = view.strip.getBoundingClientRect();
    return Math.min(view.total, Math.max(0, ((event.clientX - area.left) / area.width) * view.total));
  };
  view.whole.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    const [from, to] = slotsWindow(view);
    const seconds = secondsAt(event);
    const near = (9 * view.total) / view.width;
    const isWhole = view.state.from === undefined;
    held = { anchor: seconds, shift: null };
    if (!isWhole && Math.abs(seconds - from) < near) held.anchor = to;
    else if (!isWhole && Math.abs(seconds - to) < near) held.anchor = from;
    else if (!isWhole && seconds > from && seconds < to) held = { anchor: null, shift: from - seconds, width: to - from };
    view.whole.setPointerCapture(event.pointerId);
    event.preventDefault();
  });
  view.whole.addEventListener("pointermove", (event) => {
    if (!held) return;
    const seconds = secondsAt(event);
    if (held.anchor === null) slotsMove(view, seconds + held.shift, seconds + held.shift + held.width);
    else if (Math.abs(seconds - held.anchor) * view.width > 3 * view.total) slotsMove(view, Math.min(seconds, held.anchor), Math.max(seconds, held.anchor));
  });
  const release = () => { held = null; };
  view.whole.addEventListener("pointerup", release);
  view.whole.addEventListener("pointercancel", release);
  view.whole.addEventListener("dblclick", () => slotsWhole(view));
}
