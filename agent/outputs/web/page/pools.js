// Prefill and decode pools: which one has too few engines.
import {Note, Table, html, only} from "./elements.js";
import {bytes, number, seconds, share} from "./words.js";

const HEAD = ["pool", "engines", "running", "waiting", "load", "queue", "KV cache", "tokens in/s", "tokens out/s", "KV transfer", "moved/s", "transfers failed"];

const row = (address) => (pool) => [
  pool.role, {text: listed(pool.engines.map((name) => only(address, "efficiency", "engine", name))), kind: "name"},
  number(pool.running), number(pool.waiting), number(pool.load, 2), seconds(pool.queue_s), share(pool.kv_cache_usage),
  number(pool.input_tokens_per_s, 0), number(pool.output_tokens_per_s, 0), seconds(pool.transfer_s), bytes(pool.transfer_bytes_per_s),
  number(pool.transfers_failed, 0),
];

const listed = (all) => all.map((each, index) => [index > 0 && ", ", each]);

const advice = ({grow, load_ratio: ratio}) => [
  ratio === null ? "The load of one pool is unknown. " : `Prefill has ${number(ratio, 2)} times the load of decode. `,
  grow ? html`<strong>Add a ${grow} engine.</strong>` : ratio !== null && "No pool alone is too small.",
];

export const Pools = ({models, over, address}) => models.length > 0 && html`
  <h2>Prefill and decode pools, ${over}</h2>
  ${models.map((found) => html`
    <p>${found.model !== null && html`${only(address, "efficiency", "model", found.model)}: `}${advice(found)}</p>
    <${Table} label=${`Pools${found.model === null ? "" : ` of ${found.model}`}`} head=${HEAD} words=${["engines"]} rows=${found.pools.map(row(address))} pairs />`)}
  <${Note}>Load is (running + waiting) / running: 1 if no request waits. A pool is to grow if more than 2 requests wait in each of its engines,
    while less than 1 waits in those of the other. <a href="/docs/pools.md">More on pools</a>.<//>`;
