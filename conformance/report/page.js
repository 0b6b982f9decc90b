"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const lines = [...document.querySelectorAll(".line")];
  const texts = lines.map((line) => line.textContent.toLowerCase());
  const search = byId("search");
  const wanted = [...document.querySelectorAll("[name=verdict]")];

  // A line stays if all words of the search are in it and one of its roles has one of the chosen verdicts.
  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const verdicts = wanted.filter((box) => box.checked).map((box) => box.value);
    let shown = 0;
    lines.forEach((line, i) => {
      const has = line.dataset.verdicts.split(" ");
      const stays = words.every((word) => texts[i].includes(word)) && (!verdicts.length || verdicts.some((v) => has.includes(v)));
      line.hidden = !stays;
      shown += stays;
    });
    byId("count").textContent = shown;
    byId("all").textContent = lines.length;
    byId("nothing").hidden = shown > 0;
  };
  byId("filters").hidden = false;
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("filters").addEventListener("input", filter);
  filter();

  const speak = () => { document.documentElement.lang = byId("lang-zh").checked ? "zh" : "en"; };
  if ((navigator.language || "").startsWith("zh")) byId("lang-zh").checked = true;
  document.querySelectorAll("[name=language]").forEach((radio) => radio.addEventListener("change", speak));
  speak();

  // Copying: the clipboard where the browser has one for this page, else the text is left selected.
  const said = byId("copied");
  let timer = 0;
  const copy = async (code) => {
    const range = document.createRange();
    range.selectNodeContents(code);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      if (!document.execCommand("copy")) return;
    }
    said.hidden = false;
    clearTimeout(timer);
    timer = setTimeout(() => { said.hidden = true; }, 2000);
  };
  document.querySelectorAll(".copier").forEach((button) => {
    button.hidden = false;
    button.addEventListener("click", () => copy(button.parentElement.querySelector("code")));
  });

  // On paper everything is open.
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    closed.forEach((d) => { d.open = true; });
  });
  addEventListener("afterprint", () => { closed.forEach((d) => { d.open = false; }); });
})();
