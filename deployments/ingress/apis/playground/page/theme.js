// Loaded before the first paint, so that a chosen color scheme does not flash.
// Without a choice the page follows `prefers-color-scheme`.
"use strict";

{
  const chosen = localStorage.getItem("theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
