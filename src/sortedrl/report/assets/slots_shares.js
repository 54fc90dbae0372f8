// Shares of the slots in equal cells of time: a run too big for single bars.

// Adds to `row` how much of each of its cells lies between two places; sums follow in slotsSettle.
function slotsCover(row, steps, from, to) {
  const cells = row.length;
  const a = from < 0 ? 0 : from > cells ? cells : from;
  const b = to < 0 ? 0 : to > cells ? cells : to;
  if (b <= a) return;
  const left = Math.floor(a);
  const right = Math.floor(b);
  if (left < cells) row[left] += left + 1 - a;
  steps[left + 1] += 1;
  if (right < cells) row[right] -= right + 1 - b;
  steps[right + 1] -= 1;
}

function slotsSettle(row, steps) {
  let level = 0;
  for (let cell = 0; cell < row.length; cell += 1) {
    level += steps[cell];
    row[cell] += level;
  }
}

// Slot-seconds of each colour in equal cells of time, in cells; the last row is discarded tokens.
function slotsCells(run, classes, names, { from, to, cells, spans }) {
  const rows = Array.from({ length: names.length + 1 }, () => new Float64Array(cells));
  const steps = rows.map(() => new Float64Array(cells + 2));
  const scale = cells / (to - from);
  const last = names.length;
  for (let pair = 0; pair < spans.length; pair += 2) {
    for (let bar = spans[pair]; bar < spans[pair + 1]; bar += 1) {
      const start = (run.start[bar] - from) * scale;
      const end = (run.end[bar] - from) * scale;
      const cut = run.discarded[bar] ? (run.cut[bar] - from) * scale : end;
      slotsCover(rows[classes[bar]], steps[classes[bar]], start, cut);
      if (cut < end) slotsCover(rows[last], steps[last], cut, end);
    }
  }
  rows.forEach((row, place) => slotsSettle(row, steps[place]));
  return rows;
}

// Seconds of rollouts, updates and weight syncs in equal cells of time, in cells.
function slotsBandCells(run, { from, to, cells }) {
  const rows = SLOTS_BANDS.map(() => new Float64Array(cells));
  const steps = rows.map(() => new Float64Array(cells + 2));
  const scale = cells / (to - from);
  run.bandKind.forEach((kind, band) => {
    slotsCover(rows[kind], steps[kind], (run.bandStart[band] - from) * scale, (run.bandEnd[band] - from) * scale);
  });
  rows.forEach((row, place) => slotsSettle(row, steps[place]));
  return rows;
}

// Sums from the run's start to the edge of each fine cell, so that any interval is one difference.
function slotsBins(run, classes, names) {
  const spans = Int32Array.of(0, run.start.length);
  const rows = slotsCells(run, classes, names, { from: 0, to: run.seconds || 1, cells: SLOTS_BINS, spans });
  return rows.map((row) => {
    const sums = new Float64Array(SLOTS_BINS + 1);
    for (let cell = 0; cell < SLOTS_BINS; cell += 1) sums[cell + 1] = sums[cell] + row[cell];
    return sums;
  });
}

function slotsSumAt(sums, place) {
  if (place <= 0) return 0;
  if (place >= SLOTS_BINS) return sums[SLOTS_BINS];
  const cell = Math.floor(place);
  return sums[cell] + (place - cell) * (sums[cell + 1] - sums[cell]);
}

// The same as slotsCells for all slots, from the sums.
function slotsBinned(bins, run, { from, to, cells }) {
  const scale = SLOTS_BINS / (run.seconds || 1);
  const width = ((to - from) / cells) * scale;
  return bins.map((sums) => {
    const row = new Float64Array(cells);
    let before = slotsSumAt(sums, from * scale);
    for (let cell = 0; cell < cells; cell += 1) {
      const after = slotsSumAt(sums, from * scale + (cell + 1) * width);
      row[cell] = (after - before) / width;
      before = after;
    }
    return row;
  });
}

// Layers from the bottom up, each a share of the slot-seconds of its cell: [name, row].
function slotsLayers(view, panel, cells, window) {
  const { run } = panel;
  const [low, high] = slotsShown(view, run);
  const isWhole = high - low === run.slots;
  const { spans, count } = slotsSpans(view, run, window);
  const part = { from: window[0], to: window[1], cells, spans };
  const { names } = view.colours;
  const classes = view.colours.classes[panel.place];
  const isFine = count <= SLOTS_MOST_BARS || !isWhole;
  if (!isFine) panel.bins ||= slotsBins(run, classes, names);
  const rows = isFine ? slotsCells(run, classes, names, part) : slotsBinned(panel.bins, run, part);
  const [rollout, update, handOver] = slotsBandCells(run, part);
  const slots = high - low;
  const idle = rollout.map((seconds, cell) => Math.max(0, seconds - rows.reduce((sum, row) => sum + row[cell], 0) / slots));
  rows.forEach((row) => row.forEach((seconds, cell) => { row[cell] = seconds / slots; }));
  return [...rows.map((row, place) => [names[place] || "discarded", row]), ["idle", idle], ["hand-over", handOver], ["update", update]];
}
