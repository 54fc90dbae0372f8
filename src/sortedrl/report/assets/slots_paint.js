// Draws the slot timeline: bars or shares, bands, groups, the axis, the whole run as a strip.

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
        // the thin gap between one answer and the next
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
    const text = "group " + run.loadGroup[place].toLocaleString("en");
    const width = context.measureText(text).width + 4 * ratio;
    if (x < 0 || x > across || x < free) return;
    free = x + width + 8 * ratio;
    context.fillRect(x, -12 * ratio, ratio, depth + 12 * ratio);
    if (x + width <= across) context.fillText(text, x + 4 * ratio, -SLOTS_HEAD * ratio + 2 * ratio);
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
  const text = "ends at " + slotsFigure(run.seconds) + " s";
  if (context.measureText(text).width + 16 * ratio < across - left) context.fillText(text, left + 8 * ratio, down / 2);
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
    const text = slotsSeconds(mark * step, digits) + " s";
    const width = context.measureText(text).width;
    context.fillStyle = view.look.muted;
    context.fillRect(Math.min(across - ratio, Math.round(x)), 0, ratio, 5 * ratio);
    context.fillText(text, Math.min(across - width, Math.max(0, x - width / 2)), 8 * ratio);
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
