// What the slot timeline says: the window, the legend, the tip. Needs browse.js.

function slotsTell(view, [from, to], count) {
  const { digits } = slotsStep(to - from, 50);
  const isWhole = view.state.from === undefined;
  const end = slotsFigure(view.total) + " s";
  let text = isWhole ? "All " + end : slotsSeconds(from, digits) + " s to " + slotsSeconds(to, digits) + " s of " + end;
  if (view.state.high - view.state.low < 1) {
    const run = view.runs[0];
    const [low, high] = slotsShown(view, run);
    text += view.runs.length > 1
      ? ", a part of the slots"
      : ", " + (high - low === 1 ? "slot " + low : "slots " + low + " to " + (high - 1)) + " of " + run.slots.toLocaleString("en");
  }
  if (!view.isBars) {
    const way = count > SLOTS_MOST_BARS ? "zoom in" : "show fewer slots";
    text += "; " + counted(count, "bar") + " as shares of the slots, " + way + " to see each";
  }
  view.summary.textContent = text;
  Object.assign(view.box.dataset, { from: String(from), to: String(to), drawn: view.isBars ? "bars" : "shares", bars: String(count) });
  view.buttons.out.disabled = view.buttons.whole.disabled = isWhole && view.state.high - view.state.low >= 1;
  if (isWhole) view.buttons.out.disabled = true;
  view.buttons.more.disabled = view.state.high - view.state.low >= 1;
  view.pane.style.left = (100 * from) / view.total + "%";
  view.pane.style.width = (100 * (to - from)) / view.total + "%";
  view.pane.hidden = isWhole;
}

function slotsLegend(view) {
  const { names, labels, title, classes } = view.colours;
  const used = new Set();
  classes.forEach((row) => row.forEach((colour) => used.add(colour)));
  const entries = names.map((name, place) => [name, labels[place], used.has(place)]);
  const kinds = new Set(view.runs.flatMap((run) => run.bandKind));
  entries.push(["discarded", "discarded later", view.runs.some((run) => run.discarded.some((tokens) => tokens > 0))]);
  entries.push(["idle", "idle slot", true], ["update", "update", kinds.has(1)], ["hand-over", "hand-over of weights", kinds.has(2)]);
  entries.push(["pause", "stopping and scoring", view.runs.some(slotsHasPauses)]);
  const items = entries.filter(([, , isUsed]) => isUsed).map(([name, label]) => {
    const swatch = element("span", "slots-swatch slots-is-" + name);
    if (name !== "discarded") swatch.style.background = "var(--slots-" + name + ")";
    return element("li", "", swatch, label);
  });
  view.key.replaceChildren(...(title ? [element("li", "", title)] : []), ...items);
}

// Whether more than a thousandth of a run is neither rollout nor update nor hand-over.
function slotsHasPauses(run) {
  const known = run.bandStart.reduce((sum, start, band) => sum + run.bandEnd[band] - start, 0);
  return run.seconds - known > run.seconds / 1000;
}

// All bars of the answer that a bar is part of, in their order.
function slotsStretches(run, bar) {
  const found = [];
  for (let other = 0; other < run.answer.length; other += 1) if (run.answer[other] === run.answer[bar]) found.push(other);
  return found.sort((a, b) => run.start[a] - run.start[b]);
}

function slotsOutcome(run, bar) {
  const answer = run.answer[bar];
  const lost = run.discarded[bar];
  if (lost && lost === run.decoded[bar]) return "thrown away";
  const isTrained = !Number.isNaN(run.length[answer]);
  const fate = run.finished[bar] ? (isTrained ? "trained on" : "complete, not trained on yet")
    : isTrained ? "interrupted, continued later"
      : run.decoded[bar] ? "interrupted, not trained on yet" : "still being written when the log ends";
  return lost ? fate + ", a part thrown away" : fate;
}

function slotsSlotOf(run, bar) {
  let slot = 0;
  while (run.first[slot + 1] <= bar) slot += 1;
  return slot;
}

// What the tip says about a bar: the answer, this stretch of it, the weights, the times.
function slotsFacts(run, bar) {
  const answer = run.answer[bar];
  const stretches = slotsStretches(run, bar);
  const writers = stretches.filter((other) => run.decoded[other] > run.discarded[other]).map((other) => run.version[other]);
  const [oldest, newest] = [Math.min(...writers), Math.max(...writers)];
  const { digits } = slotsStep((run.end[bar] - run.start[bar]) || run.tick, 20);
  const number = (value) => value.toLocaleString("en");
  const isOpen = Number.isNaN(run.length[answer]);
  const rows = [
    ["outcome", slotsOutcome(run, bar)],
    ["group", number(run.group[answer])],
    ["length", isOpen ? "not known yet" : counted(run.length[answer], "token")],
    ["reward", Number.isNaN(run.reward[answer]) ? "none known" : String(run.reward[answer])],
    ["this stretch", stretches.indexOf(bar) + 1 + " of " + stretches.length + ", in slot " + number(slotsSlotOf(run, bar))],
    ["written here", counted(run.decoded[bar], "token")],
    ["kept from before", number(run.kept[bar])],
    ["discarded later", number(run.discarded[bar])],
    ["written by", "version " + number(run.version[bar])],
    ["whole answer by", !writers.length ? "none" : oldest === newest ? "version " + number(oldest) : "versions " + number(oldest) + " to " + number(newest)],
    ["trained on at", Number.isNaN(run.trainedAt[answer]) ? "not yet" : "version " + number(run.trainedAt[answer])],
    ["time", slotsSeconds(run.start[bar], digits) + " s to " + slotsSeconds(run.end[bar], digits) + " s"],
  ];
  return [element("strong", "", "prompt " + number(run.prompt[answer]) + ", sample " + number(run.sample[answer])), facts(rows)];
}

// The update or hand-over of a moment, or -1.
function slotsBandAt(run, seconds) {
  return run.bandKind.findIndex((kind, band) => kind > 0 && run.bandStart[band] <= seconds && seconds < run.bandEnd[band]);
}

// What the tip says where no bar is: a band, an idle slot, or the shares of a moment.
function slotsMoment(view, panel, seconds) {
  const { run } = panel;
  const [from, to] = slotsWindow(view);
  const { digits } = slotsStep(to - from, 200);
  const time = slotsSeconds(seconds, digits) + " s";
  const band = slotsBandAt(run, seconds);
  if (band >= 0) {
    const took = slotsFigure(run.bandEnd[band] - run.bandStart[band]) + " s";
    return [element("strong", "", run.bandKind[band] === 1 ? "update" : "hand-over of weights"), facts([["took", took], ["time", time]])];
  }
  if (view.isBars) return [];
  const half = (to - from) / view.width / 2;
  const labels = Object.fromEntries(view.colours.names.map((name, place) => [name, view.colours.labels[place]]));
  const rows = slotsLayers(view, panel, 1, [seconds - half, seconds + half])
    .filter(([, row]) => row[0] > 0.0005)
    .map(([name, row]) => [labels[name] || { discarded: "discarded later" }[name] || name, (100 * row[0]).toFixed(1) + "\u00a0%"]);
  return [element("strong", "", "slots at " + time), facts(rows)];
}
