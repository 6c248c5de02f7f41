// Files that the page makes of its figures.

// A spreadsheet would run a name that begins like this as a formula.
const FORMULA = /^[=+\-@\t\r]/;

function field(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const text = String(value);
  const harmless = FORMULA.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(harmless) ? `"${harmless.replaceAll('"', '""')}"` : harmless;
}

// Rows as CSV, each with these fields; an unknown value is empty.
export const as_csv = (names, rows) =>
  [names, ...rows.map((row) => names.map((name) => row[name]))].map((cells) => `${cells.map(field).join(",")}\r\n`).join("");

export function save(name, text) {
  const url = URL.createObjectURL(new Blob([text], {type: "text/csv"}));
  const link = Object.assign(document.createElement("a"), {href: url, download: name});
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 0);
}
