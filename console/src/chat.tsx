// A chat with one model or several side by side; each answer has its trace next to it.

import { useEffect, useRef, useState } from "preact/hooks";
import { AnswerView } from "./answer";
import { ask, type Answer, type Entry, type Options, type Question, type ToolResult } from "./conversation";
import { Composer, OptionsPanel } from "./composer";
import type { ConsoleState } from "./types";

const MOST_PANES = 4;
const EXAMPLES = ["What is 27 + 45?", "Tell me a story", "What is the weather in Paris?"];
const NO_OPTIONS: Options = { system: "", temperature: "", max_tokens: "", tools: "" };

interface Pane {
  key: number;
  model: string;
  entries: Entry[];
}

/** The panes; `say` adds entries to all of them or to one, and streams an answer in each. */
function usePanes(options: Options) {
  const [panes, setPanes] = useState<Pane[]>([]);
  const [running, setRunning] = useState(0);
  const stop = useRef(new AbortController());
  const latest = useRef(panes);
  latest.current = panes;
  const update = (key: number, change: (entries: Entry[]) => Entry[]) =>
    setPanes((all) => all.map((each) => (each.key === key ? { ...each, entries: change(each.entries) } : each)));
  const answer = async (pane: Pane, added: Entry[]) => {
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
  const say = (added: Entry[], only?: number) => {
    if (stop.current.signal.aborted) stop.current = new AbortController();
    for (const pane of latest.current) {
      if (only === undefined || pane.key === only) void answer(pane, added);
    }
  };
  return { panes, setPanes, say, isRunning: running > 0, stop: () => stop.current.abort() };
}

export function Chat({ state, isShown }: { state: ConsoleState; isShown: boolean }) {
  const models = state.models.filter((each) => each.generates);
  const [options, setOptions] = useState<Options>(NO_OPTIONS);
  const { panes, setPanes, say, isRunning, stop } = usePanes(options);
  const [hasOptionsOpen, setOptionsOpen] = useState(false);
  const numSet = Object.values(options).filter((each) => each.trim()).length;
  const numbers = useRef(0);
  const first = models[0]?.name;
  useEffect(() => {
    if (first && panes.length === 0) setPanes([{ key: (numbers.current += 1), model: first, entries: [] }]);
  }, [first, panes.length]);
  const isEmpty = panes.every((pane) => !pane.entries.length);
  const takesImages = panes.every((pane) => models.find((each) => each.name === pane.model)?.takes_images);
  const send = (text: string, images: string[]) => say([{ kind: "question", text, images } satisfies Question]);
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
          <PaneView key={pane.key} pane={pane} models={models.map(({ name }) => name)} isShown={isShown}
            canChange={!isRunning}
            onModel={(model) => setPanes(panes.map((each) => (each === pane ? { ...each, model } : each)))}
            onClose={panes.length > 1 ? () => setPanes(panes.filter((each) => each !== pane)) : undefined}
            onResults={(results) => say(results, pane.key)} />
        ))}
      </div>
      {isEmpty && (
        <p class="examples">
          {EXAMPLES.map((text) => <button key={text} onClick={() => send(text, [])}>{text}</button>)}
        </p>
      )}
      <Composer isRunning={isRunning} takesImages={takesImages} isShown={isShown} onSend={send} onStop={stop} />
    </div>
  );
}

interface PaneProps {
  pane: Pane;
  models: string[];
  isShown: boolean;
  canChange: boolean;
  onModel(model: string): void;
  onClose: (() => void) | undefined;
  onResults(results: ToolResult[]): void;
}

function PaneView({ pane, models, isShown, canChange, onModel, onClose, onResults }: PaneProps) {
  const end = useRef<HTMLDivElement>(null);
  const isLast = useRef(0);
  useEffect(() => {
    if (isShown && pane.entries.length !== isLast.current) end.current?.scrollIntoView({ block: "nearest" });
    isLast.current = pane.entries.length;
  }, [pane.entries, isShown]);
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
      <div ref={end} />
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
