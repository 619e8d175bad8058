"use strict";
// This script runs the token explorer. Without the script, the page is still complete, with static figures and tables.
document.documentElement.classList.add("script");

// Opens a folded section when a link leads to it.
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

// Shows the tokens of one image, layer by layer.
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
    const made = picture.cloneNode(true); // a copy must not have the same ids as the original
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
