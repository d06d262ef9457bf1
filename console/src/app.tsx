// The frame of the page: navigation, theme, key, connection; and which view is shown.

import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { ApiError, apiKey, follow, setApiKey } from "./api";
import { Cache } from "./cache";
import { Chat } from "./chat";
import { History } from "./history";
import { KeyForm } from "./key_form";
import { Overview } from "./overview";
import { Requests } from "./requests";
import { Tenants } from "./tenants";
import { ThemeSwitch } from "./theme";
import type { ConsoleState } from "./types";

const VIEWS = [
  ["overview", "Overview"],
  ["chat", "Chat"],
  ["requests", "Requests"],
  ["cache", "Cache"],
  ["tenants", "Tenants"],
] as const;

/** `#/requests/ID` is the view `requests` with the rest ID. */
function useRoute(): [string, string] {
  const read = () => location.hash.replace(/^#\/?/, "");
  const [route, setRoute] = useState(read);
  useEffect(() => {
    const change = () => setRoute(read());
    addEventListener("hashchange", change);
    return () => removeEventListener("hashchange", change);
  }, []);
  const [view = "", ...rest] = route.split("/");
  return [view || "overview", decodeURIComponent(rest.join("/"))];
}

interface Connection {
  state: ConsoleState | null;
  error: Error | null;
  history: History;
}

function useMesh(key: string): Connection {
  const [state, setState] = useState<ConsoleState | null>(null);
  const [error, setError] = useState<Error | null>(null);
  const history = useRef(new History());
  useEffect(() => {
    const stopped = new AbortController();
    history.current = new History();
    setState(null);
    void follow({ onState: setState, onError: setError }, stopped.signal);
    return () => stopped.abort();
  }, [key]);
  useEffect(() => {
    if (state?.mesh) history.current.note(state.mesh.health);
  }, [state]);
  return { state, error, history: history.current };
}

export function App() {
  const [view, rest] = useRoute();
  const [key, setKey] = useState(apiKey);
  const { state, error, history } = useMesh(key);
  const [asks, setAsks] = useState(false);
  const useKey = useCallback((typed: string) => {
    setApiKey(typed);
    setKey(typed);
    setAsks(false);
  }, []);
  const refused = error instanceof ApiError && error.status === 401;
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => {
        event.preventDefault();
        document.getElementById("main")?.focus();
      }}>Skip to the content</a>
      <header class="top">
        <a class="brand" href="#/overview"><img src="console/icon.svg" alt="" width="24" height="24" />TokenMesh</a>
        <nav aria-label="Views">
          {VIEWS.map(([name, title]) => (
            <a key={name} href={`#/${name}`} aria-current={view === name ? "page" : undefined}>{title}</a>
          ))}
        </nav>
        <div class="tools">
          <Status state={state} error={error} />
          <button class="quiet" onClick={() => setAsks(!asks)} aria-expanded={asks || refused}>
            {key ? "Key set" : "API key"}
          </button>
          <ThemeSwitch />
        </div>
      </header>
      <main id="main" tabIndex={-1}>
        {(asks || refused) && <KeyForm error={refused ? error.message : ""} current={key} onKey={useKey} />}
        {!(refused && !state) && (
          <View view={view} rest={rest} state={state} history={history} error={error} />
        )}
      </main>
    </>
  );
}

function Status({ state, error }: { state: ConsoleState | null; error: Error | null }) {
  const text = error ? "no connection" : state ? "live" : "connecting";
  const title = error ? error.message : state ? `${state.gateway}, version ${state.version}` : "";
  return (
    <span class={`status ${error ? "bad" : state ? "good" : ""}`} role="status" title={title}>
      <i aria-hidden="true" />{text}
    </span>
  );
}

interface ViewProps {
  view: string;
  rest: string;
  state: ConsoleState | null;
  history: History;
  error: Error | null;
}

function View({ view, rest, state, history, error }: ViewProps) {
  if (!state) {
    return <p class="empty">{error ? error.message : "Connecting to the gateway…"}</p>;
  }
  return (
    <>
      <div hidden={view !== "chat"}><Chat state={state} isShown={view === "chat"} /></div>
      {view === "requests" && <Requests state={state} id={rest} />}
      {view === "cache" && <Cache state={state} history={history} />}
      {view === "tenants" && <Tenants state={state} />}
      {!["chat", "requests", "cache", "tenants"].includes(view) && (
        <Overview state={state} history={history} />
      )}
    </>
  );
}
