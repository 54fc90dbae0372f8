// The bars of a run: from columns of numbers to arrays, and how to find one.

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
    name: packed.name, subtitle: packed.subtitle, slots: packed.slots, tick,
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

// Where each bar starts, ends, and from when on its tokens were discarded later.
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
