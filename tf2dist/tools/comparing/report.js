// A click on the head of a column sorts the table by it; a second one turns the order round.
for (const head of document.querySelectorAll("th")) {
  head.querySelector("button").addEventListener("click", () => {
    const table = head.closest("table"), column = [...head.parentNode.children].indexOf(head);
    const order = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", order === 1 ? "ascending" : "descending");
    const key = (row) => row.children[column].dataset.value ?? row.children[column].textContent;
    const compare = (a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === "" || y === "") return (x === "") - (y === "");  // what was not measured stays at the end
      return order * (isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y);
    };
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compare));
  });
}
