// The box of the page of model families: shows the sections and rows that have all of its words.
document.addEventListener("DOMContentLoaded", () => {
  const box = document.querySelector("input.filter");
  if (!box) return;
  const article = box.closest("article");
  const parts = [];
  for (let element = box.closest("p, article > *")?.nextElementSibling ?? null, part; element; ) {
    if (element.tagName === "H2") parts.push((part = [element]));
    else if (part) part.push(element);
    element = element.nextElementSibling;
  }
  const rows = [...article.querySelectorAll("table tbody tr")];
  const shows = (text, words) => words.every((word) => text.toLowerCase().includes(word));
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) row.hidden = !shows(row.textContent, words);
    for (const part of parts) {
      const match = shows(part.map((element) => element.textContent).join(" "), words);
      for (const element of part) element.hidden = !match;
    }
  });
});
