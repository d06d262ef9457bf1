// The prefix cache: how many prompt tokens did not have to be computed.

import { useEffect, useState } from "preact/hooks";
import { listUsage, sumModels } from "./api";
import { Meter, Sparkline } from "./chart";
import { count, percent, short } from "./format";
import type { History } from "./history";
import type { ConsoleState, ModelUsage, ProcessState } from "./types";

export function Cache({ state, history }: { state: ConsoleState; history: History }) {
  const workers = (state.mesh?.processes ?? []).filter((each) => each.load !== null);
  return (
    <>
      <h1>Prefix cache</h1>
      <p class="note">
        Blocks of earlier prompts stay in the memory of workers. A prompt that begins with the same
        tokens is placed where they are, and only the rest is computed.
      </p>
      {state.mesh && <Rates state={state} history={history} />}
      {workers.length > 0 && <Workers workers={workers} />}
      <Models state={state} />
    </>
  );
}

function Rates({ state, history }: { state: ConsoleState; history: History }) {
  const health = state.mesh?.health;
  const cached = health?.cached_tokens_per_s ?? 0;
  const computed = health?.prompt_tokens_per_s ?? 0;
  const both = cached + computed;
  return (
    <section class="strip three" aria-label="Prompt tokens now">
      <div class="tile">
        <h2>From the cache</h2>
        <p class="value">{short(cached)}/s</p>
        <Sparkline values={history.values("cached_tokens_per_s")} label="Cached prompt tokens per second" />
        <p class="dim">counted when streams end</p>
      </div>
      <div class="tile">
        <h2>Computed</h2>
        <p class="value">{short(computed)}/s</p>
        <Sparkline values={history.values("prompt_tokens_per_s")} label="Computed prompt tokens per second" />
        <p class="dim">prompt tokens</p>
      </div>
      <div class="tile">
        <h2>Cached now</h2>
        <p class="value">{both ? percent(cached / both) : "–"}</p>
        <Meter share={both ? cached / both : 0} label="Share of cached prompt tokens" />
        <p class="dim">of prompt tokens in the last seconds</p>
      </div>
    </section>
  );
}

function Workers({ workers }: { workers: ProcessState[] }) {
  return (
    <section class="panel" aria-labelledby="cache-workers">
      <h2 id="cache-workers">Workers <span class="dim">since they started</span></h2>
      <div class="scroll" tabIndex={0} role="region" aria-labelledby="cache-workers">
        <table>
          <thead>
            <tr>
              <th scope="col">worker</th><th scope="col">model</th><th scope="col" class="num">cached</th>
              <th scope="col" class="num">computed</th><th scope="col">hits</th>
              <th scope="col">KV blocks in use</th><th scope="col" class="num">preempted</th>
            </tr>
          </thead>
          <tbody>
            {workers.map(({ id, models, load }) => load && (
              <tr key={id}>
                <th scope="row">{id}</th>
                <td>{models.join(", ")}</td>
                <td class="num">{count(load.cached_tokens)}</td>
                <td class="num">{count(load.prefill_tokens)}</td>
                <td><Hits cached={load.cached_tokens} all={load.cached_tokens + load.prefill_tokens} /></td>
                <td>
                  <Meter share={load.kv_blocks_used / Math.max(1, load.kv_blocks_total)} label="KV blocks" />{" "}
                  {count(load.kv_blocks_used)} of {count(load.kv_blocks_total)}
                </td>
                <td class="num">{count(load.preemptions)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

function Hits({ cached, all }: { cached: number; all: number }) {
  if (!all) return <span class="dim">–</span>;
  return <><Meter share={cached / all} label="Share of cached tokens" /> {percent(cached / all)}</>;
}

function Models({ state }: { state: ConsoleState }) {
  const [models, setModels] = useState<ModelUsage[]>([]);
  const [error, setError] = useState("");
  useEffect(() => {
    listUsage(state.is_admin, "").then((found) => setModels(sumModels(found)), (problem: Error) => setError(problem.message));
  }, [state.is_admin]);
  return (
    <section class="panel" aria-labelledby="cache-models">
      <h2 id="cache-models">Models <span class="dim">this month{!state.is_admin && ", your tenant"}</span></h2>
      {error && <p class="error" role="alert">{error}</p>}
      {models.length === 0 && !error && <p class="empty">Nothing was counted this month.</p>}
      {models.length > 0 && (
        <div class="scroll" tabIndex={0} role="region" aria-labelledby="cache-models">
          <table>
            <thead>
              <tr>
                <th scope="col">model</th><th scope="col" class="num">requests</th>
                <th scope="col" class="num">prompt tokens</th><th scope="col" class="num">cached</th><th scope="col">share</th>
              </tr>
            </thead>
            <tbody>
              {models.map((each) => (
                <tr key={each.model}>
                  <th scope="row">{each.model}</th>
                  <td class="num">{count(each.requests)}</td>
                  <td class="num">{count(each.prompt_tokens)}</td>
                  <td class="num">{count(each.cached_tokens)}</td>
                  <td><Hits cached={each.cached_tokens} all={each.prompt_tokens} /></td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </section>
  );
}
