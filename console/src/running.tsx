import { count, shortId } from "./format";
import { tone } from "./spans";
import type { ConsoleState, RunningRequest } from "./types";

const PHASES = {
  preparing: "gateway",
  placing: "scheduler",
  prefill: "worker",
  generating: "worker",
} as const;

/** The requests that this gateway answers now; their bars grow with their tokens. */
export function Running({ state }: { state: ConsoleState }) {
  const { total, newest } = state.requests;
  return (
    <section class="panel" aria-labelledby="running-title">
      <h2 id="running-title">Running requests <span class="dim">{count(total)} at this gateway</span></h2>
      {total === 0 && (
        <p class="empty">
          No request is running. <a href="#/chat">Chat with a model</a>, or look at{" "}
          <a href="#/requests">recent requests</a>.
        </p>
      )}
      <ul class="running" tabIndex={newest.length ? 0 : undefined} aria-labelledby="running-title">
        {newest.map((each) => <Request key={each.id + each.path} request={each} showsTenant={state.is_admin} />)}
      </ul>
      {total > newest.length && <p class="dim">{count(total - newest.length)} more are not shown.</p>}
    </section>
  );
}

function Request({ request, showsTenant }: { request: RunningRequest; showsTenant: boolean }) {
  const share = request.max_tokens ? request.output_tokens / request.max_tokens : 0;
  const place = request.workers.map((each) => each.replace("worker-", "")).join(", ");
  return (
    <li>
      <span class="who">
        <a href={`#/requests/${encodeURIComponent(request.id)}`} title={request.id}><code>{shortId(request.id)}</code></a>
        <span class="dim">
          {[request.model, request.path || "no connection", showsTenant ? request.tenant : ""].filter(Boolean).join(" · ")}
        </span>
      </span>
      <span class={`pill ${tone(PHASES[request.phase])}`}>{request.phase}</span>
      <span class="grow" aria-hidden="true">
        <span style={{ width: `${Math.min(100, 100 * share)}%` }} />
      </span>
      <span class="num">
        {count(request.output_tokens)}{request.max_tokens > 0 && ` of ${count(request.max_tokens)}`} tokens
      </span>
      <span class="num dim">{request.age_s.toFixed(1)} s{place && ` on ${place}`}</span>
    </li>
  );
}
