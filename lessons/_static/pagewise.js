// The answer to a guess and the outputs that show it open together: those of the cells after the answer, up to the next
// heading or the next answer.
const isAnswer = (details) => details.querySelector("summary")?.textContent.trim() === "Answer";

addEventListener("DOMContentLoaded", () => {
  const folds = [...document.querySelectorAll("article details, article h1, article h2, article h3")];
  folds.forEach((answer, place) => {
    if (answer.tagName !== "DETAILS" || !isAnswer(answer)) return;
    answer.addEventListener("toggle", () => {
      for (const next of folds.slice(place + 1)) {
        if (next.tagName !== "DETAILS" || isAnswer(next)) return;
        if (next.closest(".tag_hide-output")) next.open = answer.open;
      }
    });
  });
});
