// Charts by uPlot, in the colours of the page.
import {Component, html} from "./elements.js";
import {UNKNOWN, number} from "./words.js";

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
// Requests per second: two engines' rates often differ in the second digit alone.
const rate = (value) => number(value, 2);
const HEIGHT = 220;
// Pixels of the y axis, so that charts below each other have one time axis.
const AXIS = 60;
const END = 28;
const DAY_S = 86400;

// `data` is uPlot's: x values, then one list for each of the `series` of {label, colour, ...}.
// `unit` writes a value of the y axis, `right` one of the right axis, for series with the scale "right";
// `marks` are Unix seconds of vertical lines, `bands` pairs of them that are shaded, `over` those at which
// the window begins and ends. Of `stacked` data each list is added to those before it. `log` is a
// logarithmic y axis.
export const Chart = (props) => props.data.slice(1).some((values) => values.some((each) => each != null))
  ? html`<${Plot} ...${props} />`
  : html`<div><p class="quiet">${props.label}</p><p>Unknown: ${props.why ?? "no step of this window has these figures yet"}.</p></div>`;

const clock = (at) => at.toLocaleTimeString([], {hour: "numeric", minute: "2-digit"});
const day = (at) => at.toLocaleDateString([], {month: "short", day: "numeric"});

const MINUTE_S = 60;
const exact = (at) => at.toLocaleTimeString([], {hour: "numeric", minute: "2-digit", second: "2-digit"});

// Times of day, and the date where a day begins; seconds only of ticks that are less than a minute apart.
export const moments = (_, ticks, __, ___, apart) => ticks.map((tick) => {
  const at = new Date(1000 * tick);
  if (apart < MINUTE_S) return exact(at);
  return apart >= DAY_S || at.getHours() + at.getMinutes() === 0 ? day(at) : clock(at);
});

const newest = (plot) => {
  if (plot.cursor.idx == null) plot.setLegend({idx: plot.data[0].length - 1}, false);
};

const lines = (marks) => (plot) => {
  const {ctx, bbox} = plot;
  ctx.save();
  ctx.strokeStyle = style("--warn");
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([6, 4]);
  for (const mark of marks) {
    const x = plot.valToPos(mark, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
};

// Below axes and series.
const shade = (bands) => (plot) => {
  const {ctx, bbox} = plot;
  ctx.save();
  ctx.fillStyle = `${style("--bad")}2e`;
  for (const [from, until] of bands) {
    const [left, right] = [from, until].map((at) =>
      Math.min(Math.max(plot.valToPos(at, "x", true), bbox.left), bbox.left + bbox.width));
    ctx.fillRect(left, bbox.top, right - left, bbox.height);
  }
  ctx.restore();
};

// What a drag on any chart calls with two moments, and a double click without any.
let chosen = () => {};
export const on_range = (take) => { chosen = take; };

// A shorter drag was a click, and a shorter range has no two steps.
const LEAST_PIXELS = 8;
const LEAST_S = 120;

const take_range = (plot) => {
  const {left, width} = plot.select;
  if (width < LEAST_PIXELS) return;
  plot.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
  const [first, then] = [left, left + width].map((x) => plot.posToVal(x, "x"));
  const wider_s = Math.max(0, LEAST_S - (then - first)) / 2;
  const [from, until] = [first - wider_s, then + wider_s].map((at) => new Date(1000 * at).toISOString());
  chosen({from, until});
};

const in_time = ({unit, right, log}, over) => ({
  // The whole window, also if no step has a figure: less would look like a shorter one.
  scales: {x: {time: true, range: over}, y: log ? {distr: 3} : {range: from_zero}, ...(right && {right: {range: from_zero}})},
  x: {value: (_, at) => (at == null ? "" : new Date(1000 * at).toLocaleTimeString())},
  axes: [{values: moments, space: 80}, {values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : unit(tick))), size: AXIS},
    ...(right ? [{scale: "right", side: 1, grid: {show: false}, values: (_, ticks) => ticks.map(right), size: AXIS}] : [])],
  hooks: {ready: [newest], setData: [newest], setCursor: [newest], setSelect: [take_range]},
  // All charts show the moment that the pointer is at.
  cursor: {sync: {key: "time"}, drag: {x: true, y: false, setScale: false}, bind: {dblclick: () => () => chosen(null)}},
});

class Plot extends Component {
  keep = (holder) => { this.holder = holder ?? this.holder; };

  componentDidMount() {
    this.draw();
    this.resized = new ResizeObserver(([{contentRect}]) => {
      const width = Math.floor(contentRect.width);
      if (this.plot && width && width !== this.plot.width) this.plot.setSize({width, height: HEIGHT});
    });
    this.resized.observe(this.holder);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.redraw = () => this.draw();
    this.scheme.addEventListener("change", this.redraw);
  }

  componentDidUpdate() {
    if (this.shape !== shape(this.props)) this.draw();
    else this.plot.setData(drawn_data(this.props));
  }

  componentWillUnmount() {
    this.scheme.removeEventListener("change", this.redraw);
    this.resized.disconnect();
    this.plot.destroy();
  }

  draw() {
    this.plot?.destroy();
    this.shape = shape(this.props);
    const {series, marks = [], bands: shaded = [], unit = rate, right, stacked} = this.props;
    const {scales, axes, x, hooks = {}, legend = {}, cursor = {}} =
      this.props.axes ? this.props : {...this.props, ...in_time({...this.props, unit}, () => this.props.over)};
    const drawn = {
      width: Math.max(Math.floor(this.holder.clientWidth), 200), height: HEIGHT, scales, legend, cursor, padding: [null, right ? 8 : END, null, null],
      hooks: {...hooks, drawClear: [shade(shaded)], draw: [lines(marks)]},
      axes: axes.map((axis) => ({
        stroke: style("--text"), ...["grid", "ticks"].reduce((lines, name) => (
          {...lines, [name]: {stroke: style("--line"), width: 1}}), {}),
        ...axis,
      })),
      series: [x, ...series.map(({colour, points, ...given}, place) => {
        const stroke = style(colour);
        const show = given.scale === "right" ? right : unit;
        // Of stacked data the legend has each value of its own.
        const value = (_, each, __, step) => {
          const own = stacked && step != null ? this.props.data[place + 1]?.[step] : each;
          return own == null ? UNKNOWN : show(own);
        };
        return {stroke, width: 2, value, points: {stroke, fill: stroke, ...points},
          ...(stacked && !given.dash && {fill: `${stroke}66`, width: 1, points: {show: false}}), ...given};
      })],
      ...(stacked && {bands: bands(series)}),
    };
    this.plot = new uPlot(drawn, drawn_data(this.props), this.holder.querySelector(".plot"));
  }

  render({label}) {
    return html`<figure ref=${this.keep}><figcaption>${label}</figcaption>
      <div class="plot" role="img" aria-label=${label}></div></figure>`;
  }
}

// Series without a dash are areas, each upon those before it; the others are lines.
function drawn_data({data, series, stacked}) {
  if (!stacked) return data;
  const [x, ...lists] = data;
  let below = x.map(() => 0);
  return [x, ...lists.map((values, place) => {
    if (series[place].dash) return values;
    below = below.map((sum, step) => sum + (values[step] ?? 0));
    return below.map((sum, step) => (lists.every((each, at) => series[at].dash || each[step] == null) ? null : sum));
  })];
}

// The area of a series ends at the one below it.
function bands(series) {
  const areas = series.map(({dash}, place) => (dash ? null : place + 1)).filter((place) => place !== null);
  return areas.slice(1).map((place, below) => ({series: [place, areas[below]]}));
}

// Heights compare only from zero on.
const from_zero = (_, low, high) => [Math.min(0, low ?? 0), high > 0 ? 1.05 * high : 1];

const shape = ({series, scales, marks, bands: shaded, right}) =>
  JSON.stringify([series.map(({label}) => label), scales, marks, shaded, Boolean(right)]);

// The last step has just begun, so its rates would fall to 0; it is left out until it is over.
export const finished = (steps) => steps.filter(({window_s: length}, index) =>
  index === 0 || index < steps.length - 1 || length >= steps[0].window_s);

const unix = (iso) => Date.parse(iso) / 1000;

// Unix seconds of rows with a time `at`.
export const times = (rows) => rows.map(({at}) => unix(at));

// When all steps of a time series begin and end.
export const over_steps = (steps) => {
  const newest = steps.at(-1);
  return [unix(steps[0].at), unix(newest.at) + newest.window_s];
};

// When the window of a summary begins and ends.
export const over_window = ({window_from: from, window_until: until}) => [unix(from), unix(until)];

// Data of a chart: the times of steps, and of each a list of values. Steps that are left out have none,
// or a line would be drawn through the time in which nothing was known.
export function with_breaks(steps, step_s, ...reads) {
  const at = times(steps);
  const all = at.flatMap((each, index) => (index && each - at[index - 1] > 1.5 * step_s ? [null, index] : [index]));
  const x = all.map((step, i) => (step === null ? at[all[i + 1] - 1] + step_s : at[step]));
  return [x, ...reads.map((read) => all.map((index) => (index === null ? null : read(steps[index]))))];
}
