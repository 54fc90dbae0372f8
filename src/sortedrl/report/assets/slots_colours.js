// What the colours of the slot timeline mean, and what they look like.

function slotsScale(values, name, isLog) {
  const sorted = values.sort();
  const distinct = [...sorted.filter((value, place) => place === 0 || value !== sorted[place - 1])];
  if (distinct.length <= SLOTS_STEPS) {
    const step = distinct.length > 1 ? (SLOTS_STEPS - 1) / (distinct.length - 1) : 0;
    return {
      names: distinct.map((_, place) => name + Math.round(place * step)),
      labels: distinct.map((value) => slotsFigure(value)),
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
  const labels = edges.map((edge, place) => (place ? slotsFigure(edges[place - 1]) + " to " : "under ") + slotsFigure(edge));
  labels.push(slotsFigure(edges[edges.length - 1]) + " and more");
  return {
    names: labels.map((_, place) => name + place),
    labels,
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

// What the colours mean: their names and labels, and for each run the number of each bar's colour.
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
    labels: [...scale.labels, { length: "length not known", reward: "no reward", age: "not trained on" }[colour]],
    title: { length: "Tokens of the answer:", reward: "Reward:", age: "Updates between generation and training:" }[colour],
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
    labels: ["trained on", "interrupted, kept and continued later", "not trained on when the log ends"],
    title: "",
    classes,
  };
}

// The colours of the page, and the hatch of discarded tokens.
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
