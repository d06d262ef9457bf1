// Recent requests with filters, and the waterfall of one.

import { useEffect, useRef, useState } from "preact/hooks";
import { getTrace, listTraces } from "./api";
import { clock, counted, duration, shortId } from "./format";
import type { ConsoleState, Trace, TraceSummary } from "./types";
import { Waterfall } from "./waterfall";

const LISTED = 100;
const REFRESH_MS = 2000;
const UNSEEN_MS = 5000;
const AGES = { "": "any time", "300": "5 minutes", "3600": "1 hour", "86400": "1 day" };
const STATUSES = { "": "any status", ok: "ok", failed: "failed", "400": "400", "429": "429", "500": "500", "503": "503" };

interface Filter {
  status: string;
  model: string;
  tenant: string;
  age: string;
  min_ms: string;
}

const ALL: Filter = { status: "", model: "", tenant: "", age: "", min_ms: "" };

export function Requests({ state, id }: { state: ConsoleState; id: string }) {
  const [filter, setFilter] = useState<Filter>(ALL);
  const [isPaused, setPaused] = useState(false);
  const { traces, error } = useTraces(filter, isPaused, state);
  const longest = Math.max(1, ...(traces ?? []).map((each) => each.end_ns - each.start_ns));
  return (
    <div class={`requests ${id ? "chosen" : ""}`}>
      <section class="panel list" aria-labelledby="requests-title">
        <div class="title">
          <h1 id="requests-title">Requests</h1>
          <button type="button" aria-pressed={isPaused} onClick={() => setPaused(!isPaused)}>
            {isPaused ? "Resume" : "Pause"}
          </button>
        </div>
        <Filters filter={filter} onChange={setFilter} state={state} />
        {error && <p class="error" role="alert">{error}</p>}
        {traces?.length === 0 && (
          <p class="empty">No request fits. <a href="#/chat">Send one in the chat</a>, or change the filter.</p>
        )}
        <ol class="traces">
          {traces?.map((each) => (
            <Line key={each.trace_id} trace={each} isChosen={[each.request_id, each.trace_id].includes(id)}
              longest={longest} showsTenant={state.is_admin} />
          ))}
        </ol>
      </section>
      <section class="panel one" aria-label="One request">
        {id ? <One id={id} /> : <p class="empty">Choose a request to see where its time went.</p>}
      </section>
    </div>
  );
}

/** The list, read again when the gateway has received spans. */
function useTraces(filter: Filter, isPaused: boolean, state: ConsoleState) {
  const [traces, setTraces] = useState<TraceSummary[] | null>(null);
  const [error, setError] = useState("");
  const spans = useRef<number | undefined>(undefined);
  spans.current = state.mesh?.num_spans;
  useEffect(() => {
    let isOver = false;
    let timer: ReturnType<typeof setTimeout> | undefined;
    let seen = -1;
    let read_ms = -Infinity;
    const refresh = async () => {
      const now = performance.now();
      const isNew = spans.current === undefined ? now - read_ms > UNSEEN_MS : spans.current !== seen;
      if (!document.hidden && (isNew || read_ms < 0)) {
        seen = spans.current ?? -1;
        read_ms = now;
        const { age, ...rest } = filter;
        const since_s = age ? Date.now() / 1000 - Number(age) : undefined;
        const min_ms = Number(rest.min_ms) || undefined;
        try {
          const found = await listTraces({ ...rest, min_ms, since_s, limit: LISTED });
          if (isOver) return;
          setTraces(found);
          setError("");
        } catch (problem) {
          if (!isOver) setError((problem as Error).message);
        }
      }
      if (!isOver && !isPaused) timer = setTimeout(refresh, REFRESH_MS);
    };
    timer = setTimeout(refresh, 0);
    return () => {
      isOver = true;
      clearTimeout(timer);
    };
  }, [filter, isPaused]);
  return { traces, error };
}

interface FilterProps {
  filter: Filter;
  onChange(filter: Filter): void;
  state: ConsoleState;
}

function Filters({ filter, onChange, state }: FilterProps) {
  const set = (name: keyof Filter) => (event: { currentTarget: HTMLSelectElement | HTMLInputElement }) =>
    onChange({ ...filter, [name]: event.currentTarget.value });
  const models = Object.fromEntries([["", "any model"], ...state.models.map(({ name }) => [name, name])]);
  const tenants = Object.keys(state.mesh?.tenant_streams ?? {});
  return (
    <form class="filters" onSubmit={(event) => event.preventDefault()}>
      <Choice label="Status" value={filter.status} options={STATUSES} onChange={set("status")} />
      <Choice label="Model" value={filter.model} options={models} onChange={set("model")} />
      <Choice label="Since" value={filter.age} options={AGES} onChange={set("age")} />
      {state.is_admin && (
        <label>Tenant
          <input value={filter.tenant} onChange={set("tenant")} placeholder="any" list="tenants" maxLength={256} />
          <datalist id="tenants">{tenants.map((each) => <option key={each} value={each} />)}</datalist>
        </label>
      )}
      <label>Longer than
        <input type="number" min="0" step="any" value={filter.min_ms} onChange={set("min_ms")} placeholder="ms" />
      </label>
      <FindById />
    </form>
  );
}

interface ChoiceProps {
  label: string;
  value: string;
  options: Record<string, string>;
  onChange(event: { currentTarget: HTMLSelectElement }): void;
}

function Choice({ label, value, options, onChange }: ChoiceProps) {
  return (
    <label>{label}
      <select value={value} onChange={onChange}>
        {Object.entries(options).sort(([a], [b]) => Number(b === "") - Number(a === "")).map(([name, title]) => (
          <option key={name} value={name}>{title}</option>
        ))}
      </select>
    </label>
  );
}

function FindById() {
  return (
    <label>Id
      <input placeholder="request, trace" maxLength={256} onKeyDown={(event) => {
        const id = event.currentTarget.value.trim();
        if (event.key === "Enter" && id) location.hash = `#/requests/${encodeURIComponent(id)}`;
      }} />
    </label>
  );
}

interface LineProps {
  trace: TraceSummary;
  isChosen: boolean;
  longest: number;
  showsTenant: boolean;
}

function Line({ trace, isChosen, longest, showsTenant }: LineProps) {
  const id = trace.request_id ?? trace.trace_id;
  const status = trace.attributes["http.response.status_code"];
  const facts = [
    trace.attributes["tokenmesh.model"],
    trace.attributes["url.path"] ?? trace.name,
    showsTenant ? trace.attributes["tokenmesh.tenant"] : "",
  ].filter(Boolean).join(" · ");
  const length = trace.end_ns - trace.start_ns;
  const isBad = trace.has_error || (typeof status === "number" && status >= 400);
  return (
    <li>
      <a href={`#/requests/${encodeURIComponent(id)}`} aria-current={isChosen ? "true" : undefined}>
        <code title={id}>{shortId(id)}</code>
        <span class={`pill ${isBad ? "failed" : "up"}`}>{String(status ?? (isBad ? "error" : "ok"))}</span>
        <span class="num">{duration(length)}</span>
        <span class="dim facts">{facts}</span>
        <span class="dim num">{clock(trace.start_ns)}</span>
        <span class="length" aria-hidden="true"><span style={{ width: `${(100 * length) / longest}%` }} /></span>
      </a>
    </li>
  );
}

function One({ id }: { id: string }) {
  const [trace, setTrace] = useState<Trace | null>(null);
  const [error, setError] = useState("");
  useEffect(() => {
    let isOver = false;
    setTrace(null);
    setError("");
    getTrace(id).then((found) => !isOver && setTrace(found), (problem: Error) => !isOver && setError(problem.message));
    return () => {
      isOver = true;
    };
  }, [id]);
  return (
    <>
      <p class="back"><a href="#/requests">← All requests</a></p>
      <h2 class="id">{id}</h2>
      {error && <p class="error" role="alert">{error}</p>}
      {trace && (
        <>
          <p class="dim">trace {trace.trace_id} · {counted(trace.spans.length, "span")}</p>
          <Waterfall trace={trace} />
        </>
      )}
    </>
  );
}
