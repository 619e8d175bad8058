"use strict";
// The explorer: without it the page is complete, with static figures and tables.
document.documentElement.classList.add("script");
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

// Folded sections open when a link leads to them.
function openTarget() {
  const target = location.hash && document.getElementById(location.hash.slice(1));
  const fold = target && target.querySelector("details.fold");
  if (!fold) return;
  fold.open = true;
  target.scrollIntoView();
}
addEventListener("hashchange", openTarget);
openTarget();
for (const folded of document.querySelectorAll("[data-closes]")) folded.open = false;
const wereOpen = new Map();
addEventListener("beforeprint", () => {
  for (const each of document.querySelectorAll("details")) { wereOpen.set(each, each.open); each.open = true; }
});
addEventListener("afterprint", () => wereOpen.forEach((open, each) => { each.open = open; }));

// The spectrum of a head, beside the cell that the pointer or the focus is on.
const inspector = document.getElementById("inspector");
const [WIDTH, HEIGHT, DECADES] = [240, 90, 6];

function spectrumPicture({ energy, keep }) {
  const picture = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true" });
  const step = WIDTH / energy.length;
  const at = value => HEIGHT - (HEIGHT - 2) * Math.max(0, 1 + Math.log10(Math.max(value, 1e-9)) / DECADES);
  const area = kept => energy.map((value, index) => (keep[index] === "1") === kept
    ? `M${(index * step).toFixed(1)} ${HEIGHT}V${at(value).toFixed(1)}h${(step * 0.84).toFixed(2)}V${HEIGHT}z` : "").join("");
  picture.append(element("path", { class: "gone", d: area(false) }), element("path", { class: "kept", d: area(true) }));
  const line = energy.map((value, index) => `${((index + 0.42) * step).toFixed(1)} ${at(value).toFixed(1)}`).join("L");
  picture.append(element("path", { class: "sum spectrum-line", d: `M${line}` }));
  const rank = keep.replaceAll("0", "").length;
  if (rank && rank < energy.length && keep.startsWith("1".repeat(rank))) {
    picture.append(element("line", { class: "cut", x1: rank * step, x2: rank * step, y1: 0, y2: HEIGHT }));
  }
  return picture;
}

function inspect(cell) {
  const spectrum = data.spectra[cell.dataset.head];
  const [title, note, axis] = ["title", "note", "axis"].map(name => {
    const made = document.createElement("p");
    made.className = name;
    return made;
  });
  title.textContent = spectrum.title;
  note.textContent = `${spectrum.note.replace(" \u00b7 ", " directions kept, ")} of the energy`;
  axis.textContent = `Energy by direction, logarithmic over ${DECADES} decades`;
  inspector.replaceChildren(title, note, spectrumPicture(spectrum), axis);
  inspector.hidden = false;
  const box = cell.getBoundingClientRect(), own = inspector.getBoundingClientRect();
  const left = Math.min(Math.max(8, box.left + box.width / 2 - own.width / 2), document.documentElement.clientWidth - own.width - 8);
  const above = box.bottom + own.height + 12 > innerHeight && box.top > own.height + 12;
  inspector.style.left = `${left + scrollX}px`;
  inspector.style.top = `${(above ? box.top - own.height - 6 : box.bottom + 6) + scrollY}px`;
}

function exploreHeads(map) {
  const cells = [...map.querySelectorAll("[data-head]")];
  if (!cells.length) return;
  map.setAttribute("role", "group");
  const hide = () => { inspector.hidden = true; };
  const focus = cell => {
    cells.forEach(each => each.setAttribute("tabindex", each === cell ? "0" : "-1"));
    cell.focus();
  };
  cells.forEach((cell, index) => {
    const title = cell.querySelector("title");
    cell.setAttribute("aria-label", title.textContent);
    title.remove(); // else the browser shows it over the spectrum
    cell.setAttribute("role", "img");
    cell.setAttribute("tabindex", index ? "-1" : "0");
    cell.addEventListener("pointerenter", () => inspect(cell));
    cell.addEventListener("pointerleave", hide);
    cell.addEventListener("focus", () => inspect(cell));
    cell.addEventListener("blur", hide);
    cell.addEventListener("keydown", event => {
      if (event.key === "Escape") hide();
      const middle = each => [each.x.baseVal.value + each.width.baseVal.value / 2, each.y.baseVal.value];
      const [x, y] = middle(cell);
      const ahead = { ArrowLeft: (a, b) => b === y && a < x, ArrowRight: (a, b) => b === y && a > x,
        ArrowUp: (a, b) => b < y, ArrowDown: (a, b) => b > y }[event.key];
      if (!ahead) return;
      event.preventDefault();
      const near = each => { const [a, b] = middle(each); return 1000 * Math.abs(b - y) + Math.abs(a - x); };
      const goals = cells.filter(each => ahead(...middle(each))).sort((one, other) => near(one) - near(other));
      if (goals.length) focus(goals[0]);
    });
  });
}
document.querySelectorAll(".maps .picture svg").forEach(exploreHeads);

// The tokens of one image, layer by layer.
function exploreTokens(root) {
  const samples = [...document.querySelectorAll(".sample-stages")].map(sample => ({
    label: sample.dataset.label,
    stages: [...sample.querySelectorAll("figure")].map(figure => ({
      picture: figure.querySelector("svg"),
      words: `${figure.querySelector("h4").textContent}: ${figure.querySelector("figcaption").textContent}`,
    })),
  }));
  const stage = root.querySelector(".stage"), state = root.querySelector(".state");
  const slider = root.querySelector("input"), choices = [...root.querySelectorAll("[data-sample]")];
  const buttons = [...root.querySelectorAll("[data-step]")];
  const copy = picture => {
    const made = picture.cloneNode(true); // the image of a copy must not have the id of the original
    made.querySelectorAll("[id]").forEach(each => each.removeAttribute("id"));
    return made;
  };
  let chosen = 0;
  function show() {
    const { label, stages } = samples[chosen], position = Number(slider.value);
    stage.replaceChildren(copy(stages[position].picture));
    state.textContent = `${label}, ${stages[position].words}`;
    slider.setAttribute("aria-valuetext", stages[position].words);
    choices.forEach((choice, index) => choice.setAttribute("aria-pressed", String(index === chosen)));
    buttons.forEach(button => { button.disabled = position + Number(button.dataset.step) < 0
      || position + Number(button.dataset.step) >= stages.length; });
  }
  function move(step) {
    slider.value = Number(slider.value) + step;
    show();
  }
  slider.max = samples[0].stages.length - 1;
  slider.value = slider.max;
  choices.forEach((choice, index) => {
    const thumbnail = copy(samples[index].stages[0].picture);
    thumbnail.setAttribute("aria-hidden", "true");
    choice.setAttribute("aria-label", samples[index].label);
    choice.append(thumbnail);
    choice.addEventListener("click", () => { chosen = index; show(); });
    choice.addEventListener("keydown", event => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step) { event.preventDefault(); move(step); }
    });
  });
  buttons.forEach(button => button.addEventListener("click", () => move(Number(button.dataset.step))));
  slider.addEventListener("input", show);
  root.hidden = false;
  show();
}
if (document.getElementById("viewer")) exploreTokens(document.getElementById("viewer"));
