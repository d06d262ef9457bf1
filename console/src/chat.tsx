// A chat with one model or several side by side; each answer has its trace next to it.

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { AnswerView } from "./answer";
import { ask, type Answer, type Entry, type Options, type Question, type ToolResult } from "./conversation";
import { Composer, EXAMPLE_TOOLS, OptionsPanel } from "./composer";
import type { ConsoleState } from "./types";

const MOST_PANES = 4;
/** How far above its end the page may be to be taken there as an answer grows. */
const NEAR_END_PX = 80;
/** Questions, the last with the tools that it is answered by. */
const EXAMPLES: { text: string; tools?: string }[] = [
  { text: "What is the capital of Japan?" },
  { text: "What is 27 + 45?" },
  { text: "What is the weather in Paris?", tools: EXAMPLE_TOOLS },
];
const NO_OPTIONS: Options = { system: "", temperature: "", max_tokens: "", tools: "" };

interface Pane {
  key: number;
  model: string;
  entries: Entry[];
}

/** The panes; `say` adds entries to all of them or to one, and streams an answer in each. */
function usePanes() {
  const [panes, setPanes] = useState<Pane[]>([]);
  const [running, setRunning] = useState(0);
  const stop = useRef(new AbortController());
  const latest = useRef(panes);
  latest.current = panes;
  const update = (key: number, change: (entries: Entry[]) => Entry[]) =>
    setPanes((all) => all.map((each) => (each.key === key ? { ...each, entries: change(each.entries) } : each)));
  const answer = async (pane: Pane, added: Entry[], options: Options) => {
    const entries = [...pane.entries, ...added];
    const place = entries.length;
    update(pane.key, () => entries);
    setRunning((number) => number + 1);
    let isCounted = true;
    const onChange = (found: Answer) => {
      update(pane.key, (all) => (all.length >= place ? [...all.slice(0, place), found, ...all.slice(place + 1)] : all));
      if (!found.isRunning && isCounted) {
        isCounted = false;
        setRunning((number) => number - 1);
      }
    };
    await ask(pane.model, entries, options, stop.current.signal, onChange);
  };
  const say = (added: Entry[], options: Options, only?: number) => {
    if (stop.current.signal.aborted) stop.current = new AbortController();
    for (const pane of latest.current) {
      if (only === undefined || pane.key === only) void answer(pane, added, options);
    }
  };
  return { panes, setPanes, say, isRunning: running > 0, stop: () => stop.current.abort() };
}

/** Keeps the end of the page in view: after each new entry, and as answers grow while it is there. */
function useFollowing(panes: Pane[], isShown: boolean) {
  const isAtEnd = useRef(true);
  const shown = useRef(0);
  useEffect(() => {
    const page = document.documentElement;
    const look = () => {
      isAtEnd.current = page.scrollHeight - page.scrollTop - page.clientHeight < NEAR_END_PX;
    };
    addEventListener("scroll", look, { passive: true });
    return () => removeEventListener("scroll", look);
  }, []);
  // Before the browser paints: the answer must not be seen behind the composer first.
  useLayoutEffect(() => {
    const entries = panes.reduce((sum, pane) => sum + pane.entries.length, 0);
    const isNew = entries > shown.current;
    shown.current = entries;
    if (isShown && entries && (isNew || isAtEnd.current)) scrollTo({ top: document.documentElement.scrollHeight });
  }, [panes, isShown]);
}

export function Chat({ state, isShown }: { state: ConsoleState; isShown: boolean }) {
  const models = state.models.filter((each) => each.generates);
  const [options, setOptions] = useState<Options>(NO_OPTIONS);
  const { panes, setPanes, say, isRunning, stop } = usePanes();
  useFollowing(panes, isShown);
  const [hasOptionsOpen, setOptionsOpen] = useState(false);
  const numSet = Object.values(options).filter((each) => each.trim()).length;
  const numbers = useRef(0);
  const first = models[0]?.name;
  useEffect(() => {
    if (first && panes.length === 0) setPanes([{ key: (numbers.current += 1), model: first, entries: [] }]);
  }, [first, panes.length]);
  const isEmpty = panes.every((pane) => !pane.entries.length);
  const takesImages = panes.every((pane) => models.find((each) => each.name === pane.model)?.takes_images);
  const send = (text: string, images: string[], chosen = options) =>
    say([{ kind: "question", text, images } satisfies Question], chosen);
  const sendExample = (text: string, tools: string | undefined) => {
    const chosen = tools ? { ...options, tools } : options;
    setOptions(chosen);
    send(text, [], chosen);
  };
  const add = () => setPanes([...panes, {
    key: (numbers.current += 1),
    model: models.find(({ name }) => panes.every((pane) => pane.model !== name))?.name ?? first ?? "",
    entries: [],
  }]);
  // New keys: what still arrives for the old conversations finds no pane.
  const clear = () => setPanes(panes.map((pane) => ({ ...pane, key: (numbers.current += 1), entries: [] })));
  if (!models.length) {
    return <p class="empty">No worker serves a model that generates text. The overview shows what runs.</p>;
  }
  return (
    <div class="chat">
      <div class="chat-head">
        <h1>Chat</h1>
        <button onClick={() => setOptionsOpen(!hasOptionsOpen)} aria-expanded={hasOptionsOpen}>
          Options{numSet > 0 && ` (${numSet} set)`}
        </button>
        <button onClick={add} disabled={panes.length >= MOST_PANES || isRunning}>Compare</button>
        <button onClick={clear} disabled={isEmpty || isRunning}>
          New chat
        </button>
      </div>
      {hasOptionsOpen && <OptionsPanel options={options} onChange={setOptions} />}
      <div class={`panes ${panes.length === 1 ? "single" : ""}`}>
        {panes.map((pane) => (
          <PaneView key={pane.key} pane={pane} models={models.map(({ name }) => name)}
            canChange={!isRunning}
            onModel={(model) => setPanes(panes.map((each) => (each === pane ? { ...each, model } : each)))}
            onClose={panes.length > 1 ? () => setPanes(panes.filter((each) => each !== pane)) : undefined}
            onResults={(results) => say(results, options, pane.key)} />
        ))}
      </div>
      {isEmpty && (
        <p class="examples">
          {EXAMPLES.map(({ text, tools }) => (
            <button key={text} onClick={() => sendExample(text, tools)}>{text}</button>
          ))}
        </p>
      )}
      <Composer isRunning={isRunning} takesImages={takesImages} isShown={isShown} onSend={send} onStop={stop} />
    </div>
  );
}

interface PaneProps {
  pane: Pane;
  models: string[];
  canChange: boolean;
  onModel(model: string): void;
  onClose: (() => void) | undefined;
  onResults(results: ToolResult[]): void;
}

function PaneView({ pane, models, canChange, onModel, onClose, onResults }: PaneProps) {
  return (
    <section class="pane" aria-label={`Conversation with ${pane.model}`}>
      <div class="pane-head">
        <label>Model{" "}
          <select value={pane.model} disabled={!canChange} onChange={(event) => onModel(event.currentTarget.value)}>
            {models.map((name) => <option key={name} value={name}>{name}</option>)}
          </select>
        </label>
        {onClose && <button class="quiet" disabled={!canChange} onClick={onClose} aria-label={`Close ${pane.model}`}>Close</button>}
      </div>
      <div class="entries" role="log" aria-live="off">
        {pane.entries.map((entry, index) => (
          <EntryView key={index} entry={entry} isLast={index === pane.entries.length - 1} onResults={onResults} />
        ))}
      </div>
    </section>
  );
}

interface EntryProps {
  entry: Entry;
  isLast: boolean;
  onResults(results: ToolResult[]): void;
}

function EntryView({ entry, isLast, onResults }: EntryProps) {
  if (entry.kind === "answer") return <AnswerView answer={entry} isLast={isLast} onResults={onResults} />;
  if (entry.kind === "result") {
    return <div class="entry result"><span class="dim">result of {entry.call.name}</span><pre>{entry.text}</pre></div>;
  }
  return (
    <div class="entry question">
      {entry.images.map((url, index) => <img key={index} src={url} alt={`Image ${index + 1} of the question`} />)}
      <p>{entry.text}</p>
    </div>
  );
}
