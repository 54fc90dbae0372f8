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
  ["age", "by age when trained on"],
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

// ---- the data

function slotsSums(column) {
  const sums = new Int32Array(column.length);
  let sum = 0;
  for (let place = 0; place < sums.length; place += 1) {
    sum += column[place];
    sums[place] = sum;
  }
  return sums;
}

// Unknown is NaN.
function slotsNumbers(column, count) {
  const numbers = new Float64Array(count).fill(NaN);
  if (column) column.forEach((value, place) => { if (value !== null) numbers[place] = value; });
  return numbers;
}

function slotsRun(packed) {
  const { answers, bars, bands, loads, tick } = packed;
  const count = answers.sample.length;
  const run = {
    name: packed.name, told: packed.told, slots: packed.slots, tick,
    seconds: packed.ticks * tick,
    prompt: slotsSums(answers.prompt), sample: Int32Array.from(answers.sample), group: slotsSums(answers.group),
    length: slotsNumbers(answers.length, count),
    trainedAt: slotsNumbers(answers.trained_at, count),
    reward: slotsNumbers(answers.reward, count),
    answer: slotsSums(bars.answer), version: slotsSums(bars.version),
    kept: Int32Array.from(bars.kept), decoded: Int32Array.from(bars.decoded), discarded: Int32Array.from(bars.discarded),
    finished: Uint8Array.from(bars.finished),
    first: new Int32Array(packed.slots + 1),
    bandKind: bands.kind,
    bandStart: Float64Array.from(slotsSums(bands.start), (ticks) => ticks * tick),
    loadStart: Float64Array.from(slotsSums(loads.start), (ticks) => ticks * tick), loadGroup: slotsSums(loads.group),
  };
  run.bandEnd = run.bandStart.map((start, place) => start + bands.width[place] * tick);
  slotsTimes(run, bars);
  return run;
}

// Where each bar starts, ends, and from when on its tokens were thrown away later.
function slotsTimes(run, bars) {
  const count = bars.gap.length;
  run.start = new Float64Array(count);
  run.end = new Float64Array(count);
  run.cut = new Float64Array(count);
  let place = 0;
  for (let slot = 0; slot < run.slots; slot += 1) {
    let now = 0;
    for (const until = place + bars.count[slot]; place < until; place += 1) {
      const start = now + bars.gap[place];
      now = start + bars.width[place];
      const live = run.decoded[place] ? 1 - run.discarded[place] / run.decoded[place] : 1;
      run.start[place] = start * run.tick;
      run.end[place] = now * run.tick;
      run.cut[place] = run.discarded[place] ? (start + live * bars.width[place]) * run.tick : run.end[place];
    }
    run.first[slot + 1] = place;
  }
}

// The first bar of a slot that ends after a second.
function slotsAfter(run, slot, seconds) {
  let low = run.first[slot];
  let high = run.first[slot + 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (run.end[middle] > seconds) high = middle; else low = middle + 1;
  }
  return low;
}

// The first bar of a slot that starts at a second or after it.
function slotsFrom(run, slot, seconds) {
  let low = run.first[slot];
  let high = run.first[slot + 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (run.start[middle] >= seconds) high = middle; else low = middle + 1;
  }
  return low;
}

// The slots shown of a run: the first, and the one after the last.
function slotsShown(view, run) {
  const low = Math.min(run.slots - 1, Math.floor(view.state.low * run.slots + 1e-9));
  return [low, Math.max(low + 1, Math.min(run.slots, Math.ceil(view.state.high * run.slots - 1e-9)))];
}

// Pairs of bars for each slot shown: the first in the window, and the one after the last.
function slotsSpans(view, run, [from, to]) {
  const [low, high] = slotsShown(view, run);
  const spans = new Int32Array(2 * (high - low));
  let count = 0;
  for (let slot = low; slot < high; slot += 1) {
    const first = slotsAfter(run, slot, from);
    const last = Math.max(first, slotsFrom(run, slot, to));
    spans[2 * (slot - low)] = first;
    spans[2 * (slot - low) + 1] = last;
    count += last - first;
  }
  return { spans, count };
}

// ---- colours

function slotsScale(values, name, isLog) {
  const sorted = values.sort();
  const distinct = [...sorted.filter((value, place) => place === 0 || value !== sorted[place - 1])];
  if (distinct.length <= SLOTS_STEPS) {
    const step = distinct.length > 1 ? (SLOTS_STEPS - 1) / (distinct.length - 1) : 0;
    return {
      names: distinct.map((_, place) => name + Math.round(place * step)),
      words: distinct.map((value) => slotsFigure(value)),
      place: (value) => Math.max(0, distinct.findLastIndex((least) => least <= value)),
    };
  }
  const ends = [0.05, 0.95].map((share) => sorted[Math.floor(share * (sorted.length - 1))]);
  if (ends[0] === ends[1]) [ends[0], ends[1]] = [sorted[0], sorted[sorted.length - 1]];
  const [low, high] = isLog ? ends.map((end) => Math.log(Math.max(end, 1))) : ends;
  const edges = Array.from({ length: SLOTS_STEPS - 1 }, (_, place) => {
    const edge = low + ((high - low) * (place + 1)) / SLOTS_STEPS;
    return isLog ? Number(Math.exp(edge).toPrecision(2)) : edge;
  });
  const words = edges.map((edge, place) => (place ? slotsFigure(edges[place - 1]) + " to " : "under ") + slotsFigure(edge));
  words.push(slotsFigure(edges[edges.length - 1]) + " and more");
  return {
    names: words.map((_, place) => name + place),
    words,
    place: (value) => {
      const place = edges.findIndex((edge) => value < edge);
      return place < 0 ? edges.length : place;
    },
  };
}

function slotsFigure(value) {
  const digits = Math.abs(value) >= 100 || Number.isInteger(value) ? 0 : Math.abs(value) >= 10 ? 1 : Math.abs(value) >= 0.1 ? 2 : 3;
  return Number(value.toFixed(digits)).toLocaleString("en");
}

// What the colours mean: their names and words, and for each run the number of each bar's colour.
function slotsClasses(runs, colour) {
  if (colour === "outcome") return slotsOutcomes(runs);
  const valueOf = {
    length: (run, bar) => run.length[run.answer[bar]],
    reward: (run, bar) => run.reward[run.answer[bar]],
    age: (run, bar) => run.trainedAt[run.answer[bar]] - run.version[bar],
  }[colour];
  const rows = runs.map((run) => run.start.map((_, bar) => valueOf(run, bar)));
  const known = rows.map((row) => row.filter((value) => !Number.isNaN(value)));
  const scale = slotsScale(slotsJoined(known), colour === "reward" ? "reward" : "shade", colour === "length");
  const unknown = scale.names.length;
  const classes = rows.map((row) => Uint8Array.from(row, (value) => (Number.isNaN(value) ? unknown : scale.place(value))));
  return {
    names: [...scale.names, "open"],
    words: [...scale.words, { length: "length not known", reward: "no reward known", age: "not trained on" }[colour]],
    title: { length: "Tokens of the answer:", reward: "Reward:", age: "Updates between writing and training:" }[colour],
    classes,
  };
}

function slotsJoined(rows) {
  const all = new Float64Array(rows.reduce((sum, row) => sum + row.length, 0));
  let offset = 0;
  for (const row of rows) {
    all.set(row, offset);
    offset += row.length;
  }
  return all;
}

function slotsOutcomes(runs) {
  const classes = runs.map((run) => Uint8Array.from(run.answer, (answer, bar) => {
    if (Number.isNaN(run.length[answer])) return 2;
    return run.finished[bar] ? 0 : 1;
  }));
  return {
    names: ["trained", "resumed", "open"],
    words: ["trained on", "interrupted, kept and continued later", "not trained on when the log ends"],
    title: "",
    classes,
  };
}

// The colours of the page, and the hatch of what was thrown away.
function slotsLook(view) {
  const style = getComputedStyle(view.root);
  const look = (name) => style.getPropertyValue(name).trim();
  const colours = { ink: look("--ink"), muted: look("--muted"), rule: look("--rule"), paper: look("--paper"), accent: look("--accent") };
  for (const name of [...view.colours.names, ...SLOTS_BANDS, "pause", "discarded"]) colours[name] = look("--slots-" + name);
  colours.font = "12px " + style.fontFamily;
  return colours;
}

function slotsHatch(context, look, ratio) {
  const side = Math.round(5 * ratio);
  const tile = document.createElement("canvas");
  tile.width = tile.height = side;
  const brush = tile.getContext("2d");
  brush.fillStyle = look.paper;
  brush.fillRect(0, 0, side, side);
  brush.strokeStyle = look.discarded;
  brush.lineWidth = 0.42 * side;
  for (const shift of [-side, 0, side]) {
    brush.beginPath();
    brush.moveTo(shift - 1, side + 1);
    brush.lineTo(shift + side + 1, -1);
    brush.stroke();
  }
  return context.createPattern(tile, "repeat");
}

// ---- shares of the slots

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

// Slot-seconds of each colour in equal cells of time, in cells; the last row is what was thrown away.
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

// Seconds of rollouts, updates and hand-overs in equal cells of time, in cells.
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

// Sums from the run's start to the edge of each fine cell, so that any stretch is one difference.
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

// ---- drawing

function slotsBrush(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [across, down] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== across || canvas.height !== down) {
    canvas.width = across;
    canvas.height = down;
    canvas.style.height = height + "px";
  }
  const context = canvas.getContext("2d");
  context.setTransform(1, 0, 0, 1, 0, 0);
  context.clearRect(0, 0, across, down);
  return { context, ratio, across, down };
}

// A brush for the lanes of a panel: their top is 0, the numbers of groups stand above it.
function slotsLaneBrush(canvas, view, panel) {
  const brush = slotsBrush(canvas, view.width, panel.height + SLOTS_HEAD);
  const head = Math.round(SLOTS_HEAD * brush.ratio);
  brush.context.translate(0, head);
  return { ...brush, down: brush.down - head };
}

function slotsFill(brush, look, name) {
  brush.context.fillStyle = name === "discarded" ? (brush.hatch ||= slotsHatch(brush.context, look, brush.ratio)) : look[name];
}

// Cells of time for shares: a pixel wide, or, where rounds are hardly wider, some rounds wide.
// They stand at multiples of their width, so that a picture that is moved keeps its shape.
function slotsGrid(run, [from, to], { across, ratio }) {
  const inside = run.bandKind.reduce((count, kind, band) => count + (kind === 0 && run.bandEnd[band] > from && run.bandStart[band] < to), 0);
  const isDense = inside * 4 * ratio > across;
  const cells = isDense ? Math.max(Math.min(60, across), Math.round(inside / 24)) : across;
  const width = (to - from) / cells;
  const first = Math.floor(from / width);
  return { cells: cells + 1, window: [first * width, (first + cells + 1) * width], left: (first - from / width) * (across / cells), cell: across / cells };
}

// Layers as areas, the topmost first and each down to the floor, so that no hairline shows between.
function slotsDrawShares(brush, look, layers, { top, height, end, left, cell }) {
  const { context } = brush;
  const cells = layers[0][1].length;
  const ceiling = new Float64Array(cells);
  const drawn = layers.map(([name, row]) => {
    for (let place = 0; place < cells; place += 1) ceiling[place] += row[place];
    return [name, ceiling.slice(), row.some((share) => share > 1e-9)];
  });
  context.fillStyle = look.pause;
  context.fillRect(0, top, end, height);
  for (const [name, heights, isThere] of drawn.reverse()) {
    if (!isThere) continue;
    slotsFill(brush, look, name);
    context.beginPath();
    context.moveTo(left, top + height);
    for (let place = 0; place < cells; place += 1) {
      const y = top + height * (1 - Math.min(1, heights[place]));
      context.lineTo(left + place * cell, y);
      context.lineTo(left + (place + 1) * cell, y);
    }
    context.lineTo(left + cells * cell, top + height);
    context.fill();
  }
}

function slotsDrawBands(brush, look, run, { from, scale, height, kinds }) {
  const { context, across } = brush;
  run.bandKind.forEach((kind, band) => {
    const x = (run.bandStart[band] - from) * scale;
    const right = (run.bandEnd[band] - from) * scale;
    if (!kinds.includes(kind) || right < 0 || x > across) return;
    slotsFill(brush, look, SLOTS_BANDS[kind]);
    context.fillRect(x, 0, Math.max(right - x, 0.5), height);
  });
}

// One rectangle per bar, colour after colour: changing the colour is what takes time.
function slotsDrawBars(brush, look, run, { from, scale, spans, classes, names }) {
  const { context, down, ratio } = brush;
  const pitch = down / (spans.length / 2);
  const gap = pitch >= 6 * ratio ? ratio : pitch >= 3 ? 0.5 : 0;
  for (let colour = 0; colour <= names.length; colour += 1) {
    const isDiscarded = colour === names.length;
    slotsFill(brush, look, isDiscarded ? "discarded" : names[colour]);
    for (let pair = 0; pair < spans.length; pair += 2) {
      const y = (pair / 2) * pitch + gap / 2;
      for (let bar = spans[pair]; bar < spans[pair + 1]; bar += 1) {
        if (isDiscarded ? !run.discarded[bar] : classes[bar] !== colour) continue;
        const x = ((isDiscarded ? run.cut[bar] : run.start[bar]) - from) * scale;
        const right = ((isDiscarded ? run.end[bar] : run.cut[bar]) - from) * scale;
        // the thin gap that tells an answer from the next one
        const edge = right - x > 4 * ratio ? ratio * 0.75 : 0.15 * (right - x);
        context.fillRect(x, y, right - x - (isDiscarded || run.cut[bar] === run.end[bar] ? edge : 0), pitch - gap);
      }
    }
  }
}

// Where groups were loaded: a line through the slots, and above them the group's number.
function slotsDrawLoads(brush, look, run, { from, scale }) {
  const { context, ratio, across, down } = brush;
  context.font = look.font.replace(/^\d+/, (size) => Math.round(0.92 * size * ratio));
  context.textBaseline = "top";
  context.fillStyle = look.muted;
  // lines through the slots only where each group has room for one
  const seen = run.loadStart.reduce((count, start) => count + (start >= from && (start - from) * scale <= across), 0);
  const depth = seen * 40 * ratio < across ? down : 0;
  let free = -Infinity;
  run.loadStart.forEach((start, place) => {
    const x = Math.round((start - from) * scale);
    const words = "group " + run.loadGroup[place].toLocaleString("en");
    const width = context.measureText(words).width + 4 * ratio;
    if (x < 0 || x > across || x < free) return;
    free = x + width + 8 * ratio;
    context.fillRect(x, -12 * ratio, ratio, depth + 12 * ratio);
    if (x + width <= across) context.fillText(words, x + 4 * ratio, -SLOTS_HEAD * ratio + 2 * ratio);
  });
}

// A run that ends before the window does leaves the rest empty, and says when it ended.
function slotsDrawEnd(brush, look, run, { from, scale }) {
  const { context, ratio, across, down } = brush;
  const x = (run.seconds - from) * scale;
  if (x >= across - 1) return;
  const left = Math.max(0, x);
  context.clearRect(left, -SLOTS_HEAD * ratio, across - left, down + SLOTS_HEAD * ratio);
  context.font = look.font.replace(/^\d+/, (size) => Math.round(size * ratio));
  context.textBaseline = "middle";
  context.fillStyle = look.muted;
  const words = "ends at " + slotsFigure(run.seconds) + " s";
  if (context.measureText(words).width + 16 * ratio < across - left) context.fillText(words, left + 8 * ratio, down / 2);
}

function slotsDrawPanel(view, panel, window, isBars) {
  const { run, lanes } = panel;
  const brush = slotsLaneBrush(lanes, view, panel);
  const [from, to] = window;
  const scale = brush.across / (to - from);
  const place = { from, scale };
  if (isBars) {
    brush.context.fillStyle = view.look.pause;
    brush.context.fillRect(0, 0, brush.across, brush.down);
    slotsDrawBands(brush, view.look, run, { ...place, height: brush.down, kinds: [0] });
    const { spans } = slotsSpans(view, run, window);
    slotsDrawBars(brush, view.look, run, { ...place, spans, classes: view.colours.classes[panel.place], names: view.colours.names });
    slotsDrawBands(brush, view.look, run, { ...place, height: brush.down, kinds: [1, 2] });
  } else {
    const grid = slotsGrid(run, window, brush);
    const layers = slotsLayers(view, panel, grid.cells, grid.window);
    slotsDrawShares(brush, view.look, layers, { top: 0, height: brush.down, end: brush.across, ...grid });
  }
  slotsDrawLoads(brush, view.look, run, place);
  slotsDrawEnd(brush, view.look, run, place);
}

function slotsStep(span, count) {
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const times = [1, 2, 2.5, 5, 10].find((multiple) => multiple * power >= rough * 0.999);
  const digits = Math.max(0, -Math.floor(Math.log10(power) + 1e-9) + (times === 2.5 ? 1 : 0) - (times === 10 ? 1 : 0));
  return { step: times * power, digits };
}

function slotsSeconds(value, digits) {
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

function slotsDrawAxis(view, [from, to]) {
  const brush = slotsBrush(view.axis, view.width, 26);
  const { context, ratio, across } = brush;
  const { step, digits } = slotsStep(to - from, Math.max(2, view.width / 100));
  context.font = view.look.font.replace(/^\d+/, (size) => Math.round(size * ratio));
  context.textBaseline = "top";
  for (let mark = Math.ceil(from / step - 1e-9) + 0; mark * step <= to * (1 + 1e-12); mark += 1) {
    const x = ((mark * step - from) / (to - from)) * across;
    const words = slotsSeconds(mark * step, digits) + " s";
    const width = context.measureText(words).width;
    context.fillStyle = view.look.muted;
    context.fillRect(Math.min(across - ratio, Math.round(x)), 0, ratio, 5 * ratio);
    context.fillText(words, Math.min(across - width, Math.max(0, x - width / 2)), 8 * ratio);
  }
}

function slotsDrawWhole(view) {
  const height = Math.max(12, Math.min(36, Math.round(72 / view.runs.length)));
  const brush = slotsBrush(view.strip, view.width, height * view.runs.length);
  const all = { ...view, state: { low: 0, high: 1 } };
  view.panels.forEach((panel, place) => {
    const grid = slotsGrid(panel.run, [0, view.total], brush);
    const layers = slotsLayers(all, panel, grid.cells, grid.window);
    const deep = height * brush.ratio;
    const end = (brush.across * panel.run.seconds) / view.total;
    slotsDrawShares(brush, view.look, layers, { top: place * deep, height: deep - (view.runs.length > 1 ? brush.ratio : 0), end, ...grid });
  });
}

function slotsWindow(view) {
  return view.state.from === undefined ? [0, view.total] : [view.state.from, view.state.to];
}

function slotsDraw(view) {
  view.frame = 0;
  if (!view.width) return;
  const window = slotsWindow(view);
  const count = view.runs.reduce((sum, run) => sum + slotsSpans(view, run, window).count, 0);
  const isBars = count <= SLOTS_MOST_BARS && view.panels.every((panel) => slotsPitch(view, panel) >= 1);
  view.isBars = isBars;
  view.panels.forEach((panel) => slotsDrawPanel(view, panel, window, isBars));
  slotsDrawAxis(view, window);
  slotsDrawMarks(view);
  slotsTell(view, window, count);
}

function slotsSchedule(view) {
  view.frame ||= requestAnimationFrame(() => slotsDraw(view));
}

function slotsPitch(view, panel) {
  const [low, high] = slotsShown(view, panel.run);
  return panel.height / (high - low);
}

// ---- words

function slotsTell(view, [from, to], count) {
  const { digits } = slotsStep(to - from, 50);
  const isWhole = view.state.from === undefined;
  const end = slotsFigure(view.total) + " s";
  let words = isWhole ? "All " + end : slotsSeconds(from, digits) + " s to " + slotsSeconds(to, digits) + " s of " + end;
  if (view.state.high - view.state.low < 1) {
    const run = view.runs[0];
    const [low, high] = slotsShown(view, run);
    words += view.runs.length > 1
      ? ", a part of the slots"
      : ", " + (high - low === 1 ? "slot " + low : "slots " + low + " to " + (high - 1)) + " of " + run.slots.toLocaleString("en");
  }
  if (!view.isBars) {
    const way = count > SLOTS_MOST_BARS ? "zoom in" : "show fewer slots";
    words += "; " + counted(count, "bar") + " as shares of the slots, " + way + " to see each";
  }
  view.words.textContent = words;
  Object.assign(view.box.dataset, { from: String(from), to: String(to), drawn: view.isBars ? "bars" : "shares", bars: String(count) });
  view.buttons.out.disabled = view.buttons.whole.disabled = isWhole && view.state.high - view.state.low >= 1;
  if (isWhole) view.buttons.out.disabled = true;
  view.buttons.more.disabled = view.state.high - view.state.low >= 1;
  view.pane.style.left = (100 * from) / view.total + "%";
  view.pane.style.width = (100 * (to - from)) / view.total + "%";
  view.pane.hidden = isWhole;
}

function slotsLegend(view) {
  const { names, words, title, classes } = view.colours;
  const used = new Set();
  classes.forEach((row) => row.forEach((colour) => used.add(colour)));
  const entries = names.map((name, place) => [name, words[place], used.has(place)]);
  const kinds = new Set(view.runs.flatMap((run) => run.bandKind));
  entries.push(["discarded", "thrown away later", view.runs.some((run) => run.discarded.some((tokens) => tokens > 0))]);
  entries.push(["idle", "idle slot", true], ["update", "update", kinds.has(1)], ["hand-over", "hand-over of weights", kinds.has(2)]);
  entries.push(["pause", "stopping and scoring", view.runs.some(slotsHasPauses)]);
  const items = entries.filter(([, , isUsed]) => isUsed).map(([name, told]) => {
    const swatch = element("span", "slots-swatch slots-is-" + name);
    if (name !== "discarded") swatch.style.background = "var(--slots-" + name + ")";
    return element("li", "", swatch, told);
  });
  view.key.replaceChildren(...(title ? [element("li", "", title)] : []), ...items);
}

// Whether more than a thousandth of a run is neither rollout nor update nor hand-over.
function slotsHasPauses(run) {
  const told = run.bandStart.reduce((sum, start, band) => sum + run.bandEnd[band] - start, 0);
  return run.seconds - told > run.seconds / 1000;
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
  const words = Object.fromEntries(view.colours.names.map((name, place) => [name, view.colours.words[place]]));
  const rows = slotsLayers(view, panel, 1, [seconds - half, seconds + half])
    .filter(([, row]) => row[0] > 0.0005)
    .map(([name, row]) => [words[name] || { discarded: "thrown away later" }[name] || name, (100 * row[0]).toFixed(1) + "\u00a0%"]);
  return [element("strong", "", "slots at " + time), facts(rows)];
}

// ---- the pointed bar

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

// The pointed bar with the other stretches of its answer, and a stretch being marked.
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
  for (const bar of slotsStretches(run, view.pointed.bar)) {
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

// ---- zoom

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

// ---- the parts

function slotsButton(words, label, act) {
  const made = element("button", "", words);
  made.type = "button";
  made.setAttribute("aria-label", label);
  made.title = label;
  made.addEventListener("click", act);
  return made;
}

function slotsColourChoice(view) {
  const select = element("select");
  for (const [value, words] of SLOTS_CHOICES) {
    if (value !== "reward" || view.runs.some((run) => run.reward.some((reward) => !Number.isNaN(reward)))) select.append(new Option(words, value));
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
  lanes.setAttribute("aria-label", "Slot timeline of " + run.name + ". Plus and minus zoom, 0 shows everything, arrows move, shift and arrows go from bar to bar.");
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
  view.words = element("p", "slots-words");
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
    view.words, view.whole,
    ...view.panels.flatMap(({ run, lanes, mark }) => [
      element("div", "slots-title", element("strong", "", run.name), element("span", "", run.told)),
      element("div", "slots-panel", lanes, mark),
    ]),
    view.axis, view.key, hint, view.tip,
  );
  view.panels.forEach((panel) => slotsPointers(view, panel));
  slotsStrip(view);
}

// What had the focus before the page was renewed has it again.
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
