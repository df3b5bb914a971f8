// Sortable leaderboard: a click on a column heading sorts by the column, and a second click reverses the order. A search
// field filters the rows by name.
function sort(table, column, rising) {
  const value = (row) => {
    const cell = row.cells[column];
    return column === 0 ? cell.textContent.trim() : cell.dataset.value === undefined ? null : Number(cell.dataset.value);
  };
  const body = table.tBodies[0];
  const rows = [...body.rows].map((row) => ({ row, value: value(row) }));
  rows.sort((a, b) => {
    if (a.value === null || b.value === null) return (a.value === null) - (b.value === null); // missing values are last
    const order = column === 0 ? a.value.localeCompare(b.value) : a.value - b.value;
    return rising ? order : -order;
  });
  body.append(...rows.map((one) => one.row));
}

for (const table of document.querySelectorAll("table.board")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const rising = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", rising ? "ascending" : "descending");
      sort(table, column, rising);
    });
  });
  const filter = table.closest("section").querySelector(".filter");
  filter.hidden = false; // hidden in the HTML, because it needs this script
  filter.querySelector("input").addEventListener("input", (event) => {
    const wanted = event.target.value.trim().toLowerCase();
    for (const row of table.tBodies[0].rows) row.hidden = !row.cells[0].textContent.toLowerCase().includes(wanted);
  });
}
