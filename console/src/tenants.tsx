// What tenants have used in a month, and what they run now.

import { useEffect, useState } from "preact/hooks";
import { listUsage } from "./api";
import { Meter } from "./chart";
import { count, counted, percent } from "./format";
import type { ConsoleState, TenantUsage } from "./types";

const REFRESH_MS = 10000;
const SHOWN = 200;

export function Tenants({ state }: { state: ConsoleState }) {
  const [month, setMonth] = useState("");
  const [name, setName] = useState("");
  const { usages, error } = useUsage(state.is_admin, month);
  const streams = state.mesh?.tenant_streams ?? {};
  const found = usages.filter((each) => each.tenant.includes(name.trim()));
  return (
    <>
      <h1>Tenants</h1>
      <form class="filters" onSubmit={(event) => event.preventDefault()}>
        <label>Month
          <input type="month" value={month || usages[0]?.month || ""} onChange={(event) => setMonth(event.currentTarget.value)} />
        </label>
        {state.is_admin && (
          <label>Name
            <input value={name} placeholder="contains" onInput={(event) => setName(event.currentTarget.value)} />
          </label>
        )}
      </form>
      {error && <p class="error" role="alert">{error}</p>}
      <section class="panel" aria-labelledby="usage-title">
        <h2 id="usage-title">Usage <span class="dim">{state.is_admin ? counted(found.length, "tenant") : state.tenant}</span></h2>
        <div class="scroll" tabIndex={0} role="region" aria-labelledby="usage-title">
          <table>
            <thead>
              <tr>
                <th scope="col">tenant</th>
                {state.is_admin && <th scope="col" class="num">streams now</th>}
                <th scope="col" class="num">requests</th><th scope="col" class="num">prompt tokens</th>
                <th scope="col" class="num">of them cached</th><th scope="col" class="num">completion tokens</th>
                <th scope="col">monthly budget</th>
              </tr>
            </thead>
            <tbody>
              {found.slice(0, SHOWN).map((each) => (
                <Tenant key={each.tenant} usage={each} streams={state.is_admin ? (streams[each.tenant] ?? 0) : null} />
              ))}
            </tbody>
          </table>
        </div>
        {found.length > SHOWN && <p class="dim">{count(found.length - SHOWN)} more: type a part of a name.</p>}
      </section>
    </>
  );
}

function Tenant({ usage, streams }: { usage: TenantUsage; streams: number | null }) {
  const sum = (name: "requests" | "prompt_tokens" | "cached_tokens" | "completion_tokens") =>
    usage.models.reduce((total, each) => total + each[name], 0);
  return (
    <tr>
      <th scope="row">{usage.tenant}</th>
      {streams !== null && <td class="num">{count(streams)}</td>}
      <td class="num">{count(sum("requests"))}</td>
      <td class="num">{count(sum("prompt_tokens"))}</td>
      <td class="num">{sum("prompt_tokens") ? percent(sum("cached_tokens") / sum("prompt_tokens")) : "–"}</td>
      <td class="num">{count(sum("completion_tokens"))}</td>
      <td>
        {usage.monthly_tokens === null ? (
          <span class="dim">no budget</span>
        ) : (
          <>
            <Meter share={usage.total_tokens / Math.max(1, usage.monthly_tokens)} label="Budget used" />{" "}
            {count(usage.tokens_left ?? 0)} of {count(usage.monthly_tokens)} left
          </>
        )}
      </td>
    </tr>
  );
}

function useUsage(isAdmin: boolean, month: string) {
  const [usages, setUsages] = useState<TenantUsage[]>([]);
  const [error, setError] = useState("");
  useEffect(() => {
    let isOver = false;
    const read = () => {
      if (document.hidden) return;
      listUsage(isAdmin, month).then(
        (found) => {
          if (isOver) return;
          setUsages(found);
          setError("");
        },
        (problem: Error) => !isOver && setError(problem.message),
      );
    };
    read();
    const timer = setInterval(read, REFRESH_MS);
    return () => {
      isOver = true;
      clearInterval(timer);
    };
  }, [isAdmin, month]);
  return { usages, error };
}
