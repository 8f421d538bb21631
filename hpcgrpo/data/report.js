"use strict";
for (const button of document.querySelectorAll("button[data-copy]")) {
  const source = document.getElementById(button.dataset.copy);
  button.hidden = false;
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(source.textContent);
    } catch {
      const range = document.createRange();
      range.selectNodeContents(source);
      const selection = window.getSelection();
      selection.removeAllRanges();
      selection.addRange(range);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
}
let closed = [];
window.addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details.print:not([open])")];
  for (const fold of closed) fold.open = true;
});
window.addEventListener("afterprint", () => { for (const fold of closed) fold.open = false; });
