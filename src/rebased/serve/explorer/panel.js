"use strict";
// One model's panel: its tokens, its predictions, its attention, and what its state holds.
const NEWLINE = "⏎";

function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== "") made.textContent = text;
  return made;
}

function drawn(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const count = number => number.toLocaleString("en");
const percent = share => (100 * share).toFixed(share > 0.0005 && share < 0.9995 ? 1 : 0) + " %";

function lineBreak() {
  const made = element("span", "break");
  made.setAttribute("role", "presentation");
  return made;
}

const colour = (name, root = document.body) => getComputedStyle(root).getPropertyValue(name).trim();
const visible = text => text.replaceAll("\n", NEWLINE).replaceAll("\t", "⇥").replaceAll(" ", "␣");

class Panel {
  constructor(side, about) {
    this.side = side;
    this.about = about;
    this.root = at("panel").content.firstElementChild.cloneNode(true);
    this.root.classList.add(side);
    this.find = query => this.root.querySelector(query);
    this.find("h2").textContent = about.name;
    this.find(".strip").setAttribute("aria-label", `Tokens that ${about.name} reads`);
    this.find(".strip").addEventListener("keydown", event => this.onKey(event, this.answer.tokens.length));
    this.find(".layer").append(...about.layers.map((each, i) => new Option(`${each.layer + 1}: ${each.mixer}`, i)));
    this.find(".layer").value = about.layers.length - 1;
    this.find(".layer").addEventListener("change", () => { this.fillHeads(); this.changeAttention(); });
    this.find(".head").addEventListener("change", () => this.changeAttention());
    this.fillHeads();
    const matrix = this.find(".matrix"), grid = this.find(".grid");
    matrix.addEventListener("pointermove", event => this.pickRow(event));
    matrix.addEventListener("pointerdown", event => this.pickRow(event));
    matrix.addEventListener("keydown", event => this.onKey(event, this.answer.tokens.length));
    grid.addEventListener("pointermove", event => this.pickCell(event));
    grid.addEventListener("pointerdown", event => this.pickCell(event));
    grid.addEventListener("keydown", event => this.moveCell(event));
    at("panels").append(this.root);
  }

  fillHeads() {
    const layer = this.about.layers[this.find(".layer").value];
    const heads = Array.from({length: layer?.heads ?? 0}, (_, i) => new Option(String(i + 1), i));
    this.find(".head").replaceChildren(...(heads.length > 1 ? [new Option("mean of all", "")] : []), ...heads);
    for (const each of this.root.querySelectorAll(".attention label, .matrix")) each.hidden = !layer;
    this.find(".head").parentElement.hidden = heads.length < 2;
    this.find(".attention .hint").textContent = layer
      ? "Row: the selected token. The stronger the colour, the more it looks there. The shades above are the same row."
      : `No layer of this model has an attention matrix: its mixers are ${this.about.mixers.join(", ")}.`;
  }

  show(answer) {
    this.answer = answer;
    this.rows = null;
    this.cell = null;
    const {state, tokens} = answer, about = this.about;
    let held = "its mixers have no state to go on from";
    if (state) held = `state of ${count(state.bytes)} bytes ` + (state.grows ? `after ${tokens.length} tokens, and growing` : "however long the sequence is");
    this.find(".facts").textContent = `${about.mixer}, ${count(about.parameters)} parameters; ${held}.`;
    if (about.kind === "text") this.showText(); else this.showRecall();
    this.find(".readout").hidden = about.kind === "text";
  }

  showRecall() {
    const {tokens, pairs, questions, predictions} = this.answer;
    const kinds = new Map();
    for (const pair of pairs) { kinds.set(pair.position - 1, "key"); kinds.set(pair.position, "value"); }
    this.asked = new Map(questions.map(question => [question.position, question]));
    let right = 0;
    for (const {position, answer} of questions) {
      const good = predictions[position].top[0][0] === answer;
      right += good;
      kinds.set(position, good ? "key asked" : "key asked wrong");
    }
    this.find(".score").textContent = questions.length ? `${right} of ${questions.length} questions answered` : "The sequence asks nothing.";
    this.fillStrip(tokens.map((token, i) => [token === 0 ? "·" : String(token), kinds.get(i) ?? (token ? "other" : "filler")]));
    this.kinds = kinds;
    this.find(".readout").classList.add("stale"); // the former picture stays until the new one is there
    this.find(".readout .cell").textContent = "";
    if (this.answer.state) return;
    this.find(".grid").hidden = true;
    this.find(".readout .hint").textContent = `This model cannot be asked: its mixers (${this.about.mixers.join(", ")}) have no state.`;
  }

  async loadReadout(signal) {
    const answer = this.answer;
    if (this.about.kind === "text" || !answer.state || answer.readout) return;
    const readout = await ask("readout", {model: this.about.name, tokens: answer.tokens}, signal);
    if (this.answer !== answer) return;
    answer.readout = readout;
    const seen = readout.keys.length && readout.after.length;
    this.find(".readout").classList.remove("stale");
    this.find(".grid").hidden = !seen;
    let said = "No pair was read.";
    if (seen) {
      const last = readout.rank.at(-1), held = last.filter(rank => rank === 0).length;
      said = "After every second token each key is put to a copy of the state. Down: the keys in the order of reading. Across: time. The stronger the colour, the "
        + `more probable the right value; a dot: another token is likelier. Framed: the key that is asked for. At the end ${held} of ${readout.keys.length} keys can be read.`;
    }
    this.find(".readout .hint").textContent = said;
    this.find(".grid").setAttribute("aria-label", said);
    this.drawGrid();
  }

  showText() {
    const {texts, predictions, loss, bits_per_byte: bits} = this.answer;
    const comparable = bits === null ? "" : `; ${bits.toFixed(3)} bits per byte, whatever the tokenizer`;
    this.find(".score").textContent = loss === null ? "" : `Loss ${loss.toFixed(3)} nats per token${comparable}`;
    this.fillStrip(texts.map(text => [visible(text), "word"]));
    for (const [i, option] of this.options.entries())
      if (i) option.style.setProperty("--known", Math.round(100 * predictions[i - 1].probability) + "%");
  }

  fillStrip(tokens) {
    this.options = tokens.map(([text, kind], i) => {
      const option = element("span", kind, text);
      option.setAttribute("role", "option");
      option.setAttribute("aria-selected", "false");
      option.tabIndex = -1;
      option.addEventListener("pointerenter", event => { if (event.pointerType === "mouse") select(i, this.side); });
      option.addEventListener("click", () => { option.focus(); select(i, this.side); });
      return option;
    });
    const lines = this.options.flatMap(option => option.textContent === NEWLINE ? [option, lineBreak()] : [option]);
    this.find(".strip").replaceChildren(...lines);
  }

  onKey(event, n) {
    const here = this.position ?? 0;
    const to = {ArrowRight: here + 1, ArrowDown: here + 1, ArrowLeft: here - 1, ArrowUp: here - 1, Home: 0, End: n - 1}[event.key];
    if (to === undefined) return;
    event.preventDefault();
    select(Math.max(0, Math.min(n - 1, to)), this.side);
    if (event.currentTarget === this.find(".strip")) this.options[this.position].focus();
  }

  select(i) {
    const options = this.options;
    if (this.position !== undefined && options[this.position]) {
      options[this.position].setAttribute("aria-selected", "false");
      options[this.position].tabIndex = -1;
    }
    this.position = i;
    options[i].setAttribute("aria-selected", "true");
    options[i].tabIndex = 0;
    const strip = this.find(".strip"), box = strip.getBoundingClientRect(), own = options[i].getBoundingClientRect();
    if (own.top < box.top || own.bottom > box.bottom) strip.scrollTop += own.top - box.top - box.height / 2;
    this.describe();
    this.shade();
    this.drawGrid();
  }

  describe() {
    const {tokens, texts, predictions} = this.answer, i = this.position, row = predictions[i];
    let head = `Token ${i + 1} of ${tokens.length}: ${texts ? "“" + visible(texts[i]) + "”" : tokens[i]}. `;
    let wanted = null;
    if (texts) {
      wanted = i + 1 < tokens.length ? tokens[i + 1] : null;
      head += wanted === null ? "It is the last; what would come next:"
        : `Next comes “${visible(texts[i + 1])}”: probability ${percent(row.probability)}, loss ${(-Math.log(Math.max(row.probability, 1e-30))).toFixed(2)} nats.`;
    } else if (this.asked.has(i)) {
      wanted = this.asked.get(i).answer;
      head += `The key is asked for; its value is ${wanted}, probability ${percent(row.probability)}, rank ${row.rank + 1}.`;
    } else {
      const kind = this.kinds.get(i);
      head += kind ? `A ${kind}. Nothing is asked here; the model would say:` : "Nothing is asked here; the model would say:";
    }
    const list = element("dl");
    row.top.forEach(([token, share], n) => {
      const right = token === wanted ? "right-one" : "";
      const bar = element("div", "bar");
      bar.style.width = 100 * share + "%";
      const middle = element("dd");
      middle.append(bar);
      list.append(element("dt", right, texts ? visible(row.texts[n]) : token), middle, element("dd", right, percent(share)));
    });
    this.find(".detail").replaceChildren(element("p", "", head), list);
  }

  // ---- attention ----

  changeAttention() {
    return load(async signal => {
      await this.loadAttention(signal);
      for (const side of shownSides()) await panels[side].loadReadout(signal); // where that was given up for this
    });
  }

  async loadAttention(signal) {
    const layer = this.about.layers[this.find(".layer").value];
    if (!layer || !this.answer) return;
    const chosen = this.find(".head").value, head = chosen === "" ? null : Number(chosen);
    const key = `${layer.layer}|${head}`, answer = this.answer;
    if (this.rows?.key === key) return;
    const {rows} = await ask("attention", {model: this.about.name, tokens: answer.tokens, layer: layer.layer, head}, signal);
    if (this.answer !== answer) return;
    this.rows = rows;
    this.rows.key = key;
    this.paint();
    this.shade();
  }

  shade() {
    const row = this.rows?.[this.position], answer = this.asked?.get(this.position)?.answer_position;
    for (const [i, option] of this.options.entries()) {
      const weight = (row?.[i] ?? 0) / all.unit;
      option.style.setProperty("--look", Math.round(60 * Math.sqrt(weight)) + "%");
      option.classList.toggle("answer", i === answer);
    }
    this.drawMatrix();
  }

  /** Paint the whole matrix once. Which row is selected is drawn over it. */
  paint() {
    if (!this.rows) return;
    this.picture = document.createElement("canvas");
    this.picture.width = this.picture.height = this.rows.length;
    const pen = this.picture.getContext("2d");
    pen.fillStyle = colour("--own", this.root);
    this.rows.forEach((row, i) => row.forEach((weight, j) => {
      pen.globalAlpha = Math.sqrt(weight / all.unit);
      if (weight) pen.fillRect(j, i, 1, 1);
    }));
  }

  drawMatrix() {
    if (!this.rows) return;
    const canvas = this.find(".matrix"), n = this.rows.length, pen = canvas.getContext("2d");
    canvas.width = canvas.height = n;
    pen.drawImage(this.picture, 0, 0);
    pen.globalAlpha = 0.25;
    pen.fillStyle = colour("--text");
    pen.fillRect(0, this.position, n, 1);
    const row = this.rows[this.position] ?? [], best = row.indexOf(Math.max(...row));
    const where = this.answer.texts ? `“${visible(this.answer.texts[best])}”` : this.answer.tokens[best];
    canvas.setAttribute("aria-label", `Attention of ${n} tokens. Token ${this.position + 1} looks most at token ${best + 1}, ${where}: ${percent(row[best] / all.unit)}.`);
    canvas.title = canvas.getAttribute("aria-label");
  }

  pickRow(event) {
    if (!this.rows) return;
    const {top, height} = event.currentTarget.getBoundingClientRect(), n = this.answer.tokens.length;
    select(Math.max(0, Math.min(n - 1, Math.floor((event.clientY - top) / height * n))), this.side);
  }

  // ---- the state ----

  drawGrid() {
    const canvas = this.find(".grid"), readout = this.answer?.readout;
    if (canvas.hidden || !readout) return;
    const size = 8, columns = readout.after.length, rows = readout.keys.length, pen = canvas.getContext("2d");
    canvas.width = columns * size;
    canvas.height = rows * size;
    canvas.style.width = `min(100%, ${2 * canvas.width}px)`;
    const own = colour("--own", this.root), line = colour("--line"), bad = colour("--bad");
    for (let i = 0; i < columns; i++)
      for (let k = 0; k < rows; k++) {
        const rank = readout.rank[i][k];
        if (rank < 0) continue;
        pen.globalAlpha = 1;
        pen.fillStyle = line;
        pen.fillRect(i * size, k * size, size - 1, size - 1);
        pen.globalAlpha = readout.probability[i][k];
        pen.fillStyle = own;
        pen.fillRect(i * size, k * size, size - 1, size - 1);
        if (rank > 0) { // not only by colour: a mark where another token is likelier
          pen.globalAlpha = 1;
          pen.fillStyle = bad;
          pen.fillRect(i * size + 2, k * size + 2, 3, 3);
        }
      }
    pen.globalAlpha = 1;
    pen.strokeStyle = colour("--text");
    const row = readout.keys.indexOf(this.asked?.get(this.position)?.key); // the key that the selected token asks for
    if (row >= 0) pen.strokeRect(.5, row * size - .5, canvas.width - 1, size);
    if (this.cell) pen.strokeRect(this.cell[0] * size + .5, this.cell[1] * size + .5, size - 2, size - 2);
  }

  chooseCell(i, k) {
    const {readout, pairs} = this.answer;
    this.cell = [Math.max(0, Math.min(readout.after.length - 1, i)), Math.max(0, Math.min(readout.keys.length - 1, k))];
    [i, k] = this.cell;
    const key = readout.keys[k], read = readout.after[i], rank = readout.rank[i][k];
    const value = pairs.filter(pair => pair.key === key && pair.position < read).at(-1)?.value;
    this.find(".readout .cell").textContent = `After ${read} tokens, key ${key}: ` + (rank < 0 ? "not read yet."
      : `value ${value} has probability ${percent(readout.probability[i][k])}, rank ${rank + 1}.`);
    this.drawGrid();
  }

  pickCell(event) {
    if (!this.answer?.readout) return;
    const {left, top, width, height} = event.currentTarget.getBoundingClientRect(), {readout} = this.answer;
    this.chooseCell(Math.floor((event.clientX - left) / width * readout.after.length), Math.floor((event.clientY - top) / height * readout.keys.length));
  }

  moveCell(event) {
    const [dx, dy] = {ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1]}[event.key] ?? [0, 0];
    if ((!dx && !dy) || !this.answer.readout) return;
    event.preventDefault();
    const [i, k] = this.cell ?? [this.answer.readout.after.length - 1, 0];
    if (this.cell) this.chooseCell(i + dx, k + dy); else this.chooseCell(i, k);
  }
}
