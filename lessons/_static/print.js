// A printed page is light and shows the folded answers. Folded code stays folded.
let opened = [], theme;
addEventListener("beforeprint", () => {
  theme = document.documentElement.dataset.theme;
  document.documentElement.dataset.theme = "light";
  opened = [...document.querySelectorAll("details:not(.hide):not([open])")];
  for (const fold of opened) fold.open = true;
});
addEventListener("afterprint", () => {
  document.documentElement.dataset.theme = theme;
  for (const fold of opened) fold.open = false;
});
