// Which bar the reader points at, by mouse, finger or keyboard.

function slotsLocate(view, panel, event) {
  const area = panel.lanes.getBoundingClientRect();
  const [from, to] = slotsWindow(view);
  const [low, high] = slotsShown(view, panel.run);
  const x = event.clientX - area.left;
  const y = Math.min(panel.height - 1, Math.max(0, event.clientY - area.top - SLOTS_HEAD));
  const slot = low + Math.floor((y / panel.height) * (high - low));
  return { x, y, slot, seconds: from + (x / area.width) * (to - from) };
}

// The bar at a place, or the nearest one within a few pixels.
function slotsBarAt(view, run, { slot, seconds }) {
  const [from, to] = slotsWindow(view);
  const near = (4 * (to - from)) / view.width;
  const after = slotsAfter(run, slot, seconds);
  const distance = (bar) => (bar < run.first[slot] || bar >= run.first[slot + 1] ? Infinity
    : Math.max(0, run.start[bar] - seconds, seconds - run.end[bar]));
  const best = distance(after - 1) < distance(after) ? after - 1 : after;
  return distance(best) <= (slotsBandAt(run, seconds) < 0 ? near : 0) ? best : null;
}

function slotsPoint(view, panel, event) {
  const place = slotsLocate(view, panel, event);
  const bar = view.isBars ? slotsBarAt(view, panel.run, place) : null;
  const said = bar === null ? (place.seconds < panel.run.seconds ? slotsMoment(view, panel, place.seconds) : []) : slotsFacts(panel.run, bar);
  const isNew = view.pointed?.panel !== panel || view.pointed?.bar !== bar || bar === null;
  view.pointed = bar === null ? null : { panel, bar };
  if (isNew) view.tip.replaceChildren(...said);
  slotsPlaceTip(view, panel, place.x, place.y);
  slotsDrawMarks(view);
}

// Beside the pointer; on narrow screens below or above it. Never outside of what is in view.
function slotsPlaceTip(view, panel, x, y) {
  const { offsetWidth: width, offsetHeight: height } = view.tip;
  const isNarrow = view.width < 2.5 * width;
  const beside = x + 16 + width <= view.width ? x + 16 : x - 16 - width;
  const left = isNarrow ? x - width / 2 : beside;
  view.tip.style.left = Math.max(0, Math.min(left, view.width - width)) + "px";
  const origin = view.root.getBoundingClientRect().top;
  const pointer = panel.lanes.getBoundingClientRect().top + SLOTS_HEAD + y;
  const isLow = pointer + 24 + height > window.innerHeight;
  const top = isNarrow ? (isLow ? pointer - 24 - height : pointer + 24) : pointer - height / 2;
  view.tip.style.top = Math.max(8, Math.min(top, window.innerHeight - height - 8)) - origin + "px";
}

function slotsUnpoint(view) {
  view.pointed = null;
  view.tip.replaceChildren();
  slotsDrawMarks(view);
}

// The pointed bar with the other intervals of its answer, and a range being marked.
function slotsDrawMarks(view) {
  const [from, to] = slotsWindow(view);
  for (const panel of view.panels) {
    const { context, ratio, across, down } = slotsLaneBrush(panel.mark, view, panel);
    const scale = across / (to - from);
    if (view.marked) {
      const [left, right] = view.marked.map((seconds) => (seconds - from) * scale);
      context.fillStyle = view.look.accent;
      context.globalAlpha = 0.25;
      context.fillRect(left, 0, right - left, down);
      context.globalAlpha = 1;
    }
    if (!view.isBars || view.pointed?.panel !== panel) continue;
    slotsDrawAnswer(view, panel, { context, ratio, down, scale, from });
  }
}

function slotsDrawAnswer(view, panel, { context, ratio, down, scale, from }) {
  const { run } = panel;
  const [low, high] = slotsShown(view, run);
  const pitch = down / (high - low);
  context.strokeStyle = view.look.ink;
  context.lineWidth = 1.5 * ratio;
  let before = null;
  for (const bar of slotsIntervals(run, view.pointed.bar)) {
    const x = (run.start[bar] - from) * scale;
    const right = (run.end[bar] - from) * scale;
    const y = (slotsSlotOf(run, bar) - low) * pitch;
    context.setLineDash(bar === view.pointed.bar ? [] : [3 * ratio, 2 * ratio]);
    context.strokeRect(x, y, Math.max(right - x, 1), pitch);
    if (before) {
      context.setLineDash([ratio, 3 * ratio]);
      context.beginPath();
      context.moveTo(...before);
      context.lineTo(x, y + pitch / 2);
      context.stroke();
    }
    before = [right, y + pitch / 2];
  }
  context.setLineDash([]);
}

// Steps from bar to bar by the keyboard: along a slot, or to a slot beside it.
function slotsWalk(view, panel, { along, across }) {
  const { run } = panel;
  const [from, to] = slotsWindow(view);
  const [low, high] = slotsShown(view, run);
  let bar = view.pointed?.panel === panel ? view.pointed.bar : null;
  if (bar === null) {
    for (let slot = low; slot < high && bar === null; slot += 1) {
      const first = slotsAfter(run, slot, from);
      if (first < run.first[slot + 1] && run.start[first] < to) bar = first;
    }
  } else {
    const slot = slotsSlotOf(run, bar);
    const middle = (run.start[bar] + run.end[bar]) / 2;
    const next = Math.min(high - 1, Math.max(low, slot + across));
    bar = across ? Math.min(slotsAfter(run, next, middle), run.first[next + 1] - 1) : bar + along;
    const lane = across ? next : slot;
    bar = Math.min(run.first[lane + 1] - 1, Math.max(run.first[lane], bar));
    if (bar < run.first[lane]) return;
  }
  if (bar === null) return;
  const middle = (run.start[bar] + run.end[bar]) / 2;
  if (middle < from || middle > to) slotsMove(view, middle - (to - from) / 2, middle + (to - from) / 2);
  view.pointed = { panel, bar };
  view.tip.replaceChildren(...slotsFacts(run, bar));
  const [left, right] = slotsWindow(view);
  const y = (slotsSlotOf(run, bar) - low + 0.5) * slotsPitch(view, panel);
  slotsPlaceTip(view, panel, (view.width * (middle - left)) / (right - left), y);
  slotsDrawMarks(view);
}
