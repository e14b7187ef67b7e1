"use strict";
// The page of `rebased explore`. All text is put in as text, never as markup.
const at = id => document.getElementById(id);
const SIDES = ["left", "right"];
const SAMPLE = "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.";
const PAUSE = 120; // milliseconds
const all = { models: [], unit: 1000 };
const panels = {};
const curvePoints = new Map(); // "model|T|pairs" to what the server answered
let seed = 0, composed = null, loading = null, curveRound = 0;

function say(text, bad = false) {
  at("status").textContent = text;
  at("status").classList.toggle("bad", bad);
}

async function ask(path, body, signal) {
  const request = {method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(body), signal};
  const response = await fetch("api/" + path, request).catch(error => {
    throw error.name === "AbortError" ? error : new Error("The server does not answer; perhaps it has ended.");
  });
  if (response.ok) return response.json();
  let message = response.status + " " + response.statusText;
  try { message = (await response.json()).error.message; } catch { /* not ours: the status says it */ }
  throw new Error(message);
}

// ---- the models ----

const model = side => all.models.find(each => each.name === at(side).value);
const shownSides = () => SIDES.filter(side => model(side));
const fits = (a, b) => a.kind === b.kind && (a.kind === "text" || a.vocab_size === b.vocab_size);

function fillPickers(left, right) {
  at("left").replaceChildren(...all.models.map(each => new Option(each.name, each.name)));
  at("left").value = left;
  const others = all.models.filter(each => fits(each, model("left")));
  at("right").replaceChildren(new Option("nothing", ""), ...others.map(each => new Option(each.name, each.name)));
  at("right").value = others.some(each => each.name === right) ? right : "";
}

function chooseModels(left, right) {
  fillPickers(left, right);
  const kind = model("left").kind;
  at("recall").hidden = kind !== "recall";
  at("writing").hidden = kind !== "text";
  at("panels").replaceChildren();
  for (const side of SIDES) delete panels[side];
  for (const side of shownSides()) panels[side] = new Panel(side, model(side));
  if (kind === "recall") {
    const both = shownSides().map(model), longest = Math.min(...both.map(each => each.longest));
    at("length").max = longest;
    at("length").value = Math.min(longest, Number(at("length").value) || Math.max(...both.map(each => each.seq_len)));
    const {first_value, vocab_size} = both[0];
    at("tokens-hint").textContent = `Token numbers with spaces between them. 0 is the filler, 1 to ${first_value - 1} are keys, `
      + `${first_value} to ${vocab_size - 1} values. A key with a value after it is a pair; a key that comes again alone is a question.`;
    limitPairs();
    if (composed?.some(token => token >= vocab_size)) composed = null;
    return composed ? load(signal => readSequence(composed, signal)) : drawSequence();
  }
  if (!at("text").value) at("text").value = SAMPLE;
  return readText();
}

// ---- loading: what is under way is given up when something else is asked for ----

async function load(work) {
  loading?.abort();
  const mine = loading = new AbortController();
  document.body.dataset.busy = "yes";
  try {
    await work(mine.signal);
    if (loading === mine) say("");
  } catch (error) {
    if (error.name !== "AbortError" && loading === mine) say(error.message, true);
  } finally {
    if (loading === mine) document.body.dataset.busy = "no";
  }
}

function limitPairs() {
  const most = Math.max(1, Math.floor(Number(at("length").value) / 4));
  at("pairs").max = most;
  if (!at("pairs").dataset.set) at("pairs").value = Math.min(most, Math.round(1.5 * model("left").trained_pairs[1]));
  at("pairs").dataset.set = "yes";
  at("pairs-shown").textContent = at("pairs").value;
}

function drawSequence() {
  const pairs = Number(at("pairs").value), seq_len = Number(at("length").value);
  at("pairs-shown").textContent = pairs;
  composed = null;
  drawCurve();
  return load(async signal => {
    const {tokens} = await ask("sequence", {model: at("left").value, pairs, seq_len, seed}, signal);
    loadCurve();
    await readSequence(tokens, signal);
  });
}

async function readSequence(tokens, signal) {
  at("tokens").value = tokens.join(" ");
  const answers = await Promise.all(shownSides().map(side => ask("recall", {model: at(side).value, tokens}, signal)));
  shownSides().forEach((side, i) => panels[side].show(answers[i]));
  const first = answers[0].questions[0];
  select(first ? first.position : tokens.length - 1);
  await Promise.all(shownSides().map(side => panels[side].loadAttention(signal)));
  await new Promise(go => setTimeout(go, PAUSE)); // the slider may still move, and to read out takes longest
  for (const side of shownSides()) await panels[side].loadReadout(signal);
}

function useTokens() {
  const words = at("tokens").value.split(/[\s,]+/).filter(word => word);
  const wrong = words.find(word => !/^\d{1,9}$/.test(word));
  if (wrong !== undefined) return say(`“${wrong.slice(0, 40)}” is no token number; write whole numbers with spaces between them`, true);
  if (!words.length) return say("The sequence is empty; write at least one token number", true);
  composed = words.map(Number);
  return load(signal => readSequence(composed, signal));
}

function readText() {
  const text = at("text").value;
  if (!text) return say("The text is empty; type something", true);
  return load(async signal => {
    const answers = await Promise.all(shownSides().map(side => ask("text", {model: at(side).value, text}, signal)));
    shownSides().forEach((side, i) => panels[side].show(answers[i]));
    for (const side of shownSides()) panels[side].select(panels[side].answer.tokens.length - 1);
    await Promise.all(shownSides().map(side => panels[side].loadAttention(signal)));
  });
}

/** Select a position: in both panels if their tokens are the same, else in the panel `from` alone. */
function select(wanted, from) {
  const sides = shownSides(), of = side => String(panels[side].answer?.tokens);
  const chosen = sides.every(side => of(side) === of(sides[0])) ? sides : sides.filter(side => side === from);
  for (const side of chosen) panels[side].select(wanted);
}

// ---- recall against the number of pairs ----

function curvePairs() {
  const most = Number(at("pairs").max), step = Math.max(1, Math.round(most / 8));
  const found = new Set([1, Number(at("pairs").value), most]);
  for (let pairs = step; pairs < most; pairs += step) found.add(pairs);
  return [...found].sort((a, b) => a - b);
}

const pointOf = (side, pairs) => curvePoints.get(`${at(side).value}|${at("length").value}|${pairs}`);

async function loadCurve() {
  const round = ++curveRound, seq_len = Number(at("length").value), now = Number(at("pairs").value);
  const wanted = curvePairs().sort((a, b) => Math.abs(a - now) - Math.abs(b - now));
  try {
    for (const pairs of wanted)
      for (const side of shownSides()) {
        if (round !== curveRound) return;
        const name = at(side).value, key = `${name}|${seq_len}|${pairs}`;
        if (!curvePoints.has(key)) curvePoints.set(key, await ask("curve", {model: name, pairs, seq_len}));
        if (round === curveRound) drawCurve();
      }
    document.body.dataset.curve = String(round);
  } catch (error) { if (round === curveRound) say(error.message, true); }
}

function drawCurve() {
  const most = Number(at("pairs").max), now = Number(at("pairs").value);
  const width = Math.max(300, Math.min(640, at("curve").clientWidth || 640)); // letters keep their size on a phone
  at("curve").setAttribute("viewBox", `0 0 ${width} 220`);
  const [x0, x1, y0, y1] = [46, width - 12, 184, 12];
  const x = pairs => x0 + (x1 - x0) * (most > 1 ? (pairs - 1) / (most - 1) : 0.5), y = share => y0 + (y1 - y0) * share;
  const parts = [], [low, high] = model("left").trained_pairs;
  const [from, to] = [Math.max(1, low - .5), Math.min(most, high + .5)].map(x);
  if (from < to) parts.push(drawn("rect", {class: "trained", x: from, y: y1, width: to - from, height: y0 - y1}));
  for (const share of [0, 0.5, 1]) {
    parts.push(drawn("line", {class: "axis", x1: x0, x2: x1, y1: y(share), y2: y(share)}));
    parts.push(drawn("text", {x: x0 - 6, y: y(share) + 4, "text-anchor": "end"}, 100 * share + " %"));
  }
  const ticks = [...new Set([1, Math.round(most / 4), Math.round(most / 2), Math.round(3 * most / 4), most])].filter(each => each > 0);
  for (const pairs of ticks) parts.push(drawn("text", {x: x(pairs), y: y0 + 18, "text-anchor": "middle"}, pairs));
  parts.push(drawn("text", {x: (x0 + x1) / 2, y: y0 + 33, "text-anchor": "middle"}, "pairs (shaded: those of training)"));
  parts.push(drawn("line", {class: "now", x1: x(now), x2: x(now), y1: y0, y2: y1}));
  const said = [];
  for (const [i, side] of shownSides().entries()) {
    const points = [];
    for (let pairs = 1; pairs <= most; pairs++) if (pointOf(side, pairs)) points.push(pointOf(side, pairs));
    for (const each of points) parts.push(drawn("line", {class: side + " whisker", x1: x(each.pairs), x2: x(each.pairs), y1: y(each.low), y2: y(each.high)}));
    parts.push(drawn("polyline", {class: side, points: points.map(each => `${x(each.pairs)},${y(each.accuracy)}`).join(" ")}));
    for (const each of points) parts.push(drawn("circle", {class: side, cx: x(each.pairs), cy: y(each.accuracy), r: each.pairs === now ? 5 : 2.5}));
    parts.push(drawn("text", {class: side, x: x0 + 10, y: y0 - 26 + 16 * i}, at(side).value));
    const here = pointOf(side, now);
    if (here) said.push(`${at(side).value} ${percent(here.accuracy)} (${percent(here.low)} to ${percent(here.high)})`);
  }
  at("curve").replaceChildren(...parts);
  at("curve-text").textContent = said.length
    ? `At ${now} ${now === 1 ? "pair" : "pairs"} in ${at("length").value} tokens, over 64 sequences: ${said.join(", ")}.` : "Measuring …";
}

// ---- what the reader does ----

function later(wait, work) {
  let timer;
  return () => { clearTimeout(timer); timer = setTimeout(work, wait); };
}

const drawSoon = later(PAUSE, drawSequence);
at("pairs").addEventListener("input", () => { at("pairs-shown").textContent = at("pairs").value; drawCurve(); drawSoon(); });
at("length").addEventListener("change", () => {
  const {max, value} = at("length"), asked = Math.floor(Number(value) / 2) * 2;
  at("length").value = Math.max(4, Math.min(Number(max), asked || 4));
  limitPairs();
  drawSequence();
});
at("another").addEventListener("click", () => { seed = (seed + 1) % 2 ** 31; drawSequence(); });
at("use").addEventListener("click", useTokens);
at("read").addEventListener("click", readText);
at("text").addEventListener("input", later(500, readText));
at("left").addEventListener("change", () => chooseModels(at("left").value, at("right").value));
at("right").addEventListener("change", () => chooseModels(at("left").value, at("right").value));
addEventListener("resize", later(100, () => { if (!at("recall").hidden && model("left")) drawCurve(); }));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const side of shownSides()) {
    panels[side].paint();
    panels[side].drawMatrix();
    panels[side].drawGrid();
  }
});

(async () => {
  try {
    const response = await fetch("api/models");
    Object.assign(all, await response.json());
  } catch { return say("The server does not answer; perhaps it has ended.", true); }
  return chooseModels(all.left, all.right ?? "");
})();
