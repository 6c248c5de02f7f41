// What views are made of: preact's elements, written as HTML.
import htm from "./vendor/htm.js";
import {Component, h, render} from "./vendor/preact.js";

export const html = htm.bind(h);
export {Component, render};

// Pairs of a name and a value; a third member says more, for instance why it is unknown.
export const Figures = ({label, of}) => html`
  <dl class="figures" aria-label=${label}>
    ${of.map(([name, value, more, kind]) => html`
      <div class=${kind ?? ""}><dt>${name}</dt><dd>${value}</dd>
        ${more && html`<dd class="more">${more}</dd>`}</div>`)}
  </dl>`;

// Columns of numbers, or of words where `words` contains their names. Cells are texts, elements or
// {text, kind}; the first of a row is its heading.
export const Table = ({label, head, rows, words = [], empty = "Nothing here yet."}) => {
  const side = head.map((name, place) => (place === 0 || words.includes(name) ? "left" : ""));
  return html`
    <div class="scrolling" role="region" aria-label=${label} tabindex="0">
      <table>
        <caption>${label}</caption>
        <thead><tr>${head.map((name, place) => html`
          <th scope="col" class=${side[place]}>${name}</th>`)}</tr></thead>
        <tbody>${rows.map((cells) => html`<tr>${cells.map(cell(side))}</tr>`)}</tbody>
      </table>
      ${rows.length ? null : html`<p class="quiet">${empty}</p>`}
    </div>`;
};

const cell = (side) => (given, place) => {
  const {text, kind} = given?.kind ? given : {text: given, kind: ""};
  const looks = `${side[place]} ${kind}`.trim();
  return place === 0 ? html`<th scope="row" class=${looks}>${text}</th>`
    : html`<td class=${looks}>${text}</td>`;
};

export const Note = ({children}) => html`<p class="quiet">${children}</p>`;
