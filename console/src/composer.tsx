// What the user types: the question with its images, and the options of all requests.

import { useEffect, useRef, useState } from "preact/hooks";
import { type Options, parseTools } from "./conversation";

const MOST_IMAGES = 8;
const MOST_IMAGE_BYTES = 8 * 1024 * 1024;
export const EXAMPLE_TOOLS = JSON.stringify(
  [{
    type: "function",
    function: {
      name: "get_weather",
      description: "Weather of a city",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  }],
  null,
  2,
);

interface ComposerProps {
  isRunning: boolean;
  takesImages: boolean;
  isShown: boolean;
  onSend(text: string, images: string[]): void;
  onStop(): void;
}

export function Composer({ isRunning, takesImages, isShown, onSend, onStop }: ComposerProps) {
  const [text, setText] = useState("");
  const [images, setImages] = useState<string[]>([]);
  const [error, setError] = useState("");
  const box = useRef<HTMLTextAreaElement>(null);
  useEffect(() => {
    if (isShown && !isRunning && matchMedia("(hover: hover)").matches) box.current?.focus();
  }, [isShown, isRunning]);
  const send = () => {
    if (isRunning || (!text.trim() && !images.length)) return;
    onSend(text, takesImages ? images : []);
    setText("");
    setImages([]);
  };
  return (
    <form class="composer" onSubmit={(event) => {
      event.preventDefault();
      send();
    }}>
      {error && <p class="error" role="alert">{error}</p>}
      {images.length > 0 && (
        <p class="attached">
          {images.map((url, index) => (
            <button key={url} type="button" aria-label={`Remove image ${index + 1}`}
              onClick={() => setImages(images.filter((each) => each !== url))}>
              <img src={url} alt="" />×
            </button>
          ))}
        </p>
      )}
      <div class="line">
        <label class="hidden" for="question">Message</label>
        <textarea id="question" title="Enter sends, Shift+Enter is a new line" ref={box} rows={1} value={text} placeholder="Message the model"
          onInput={(event) => setText(event.currentTarget.value)}
          onKeyDown={(event) => {
            if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
            event.preventDefault();
            send();
          }} />
        <ImageButton isOn={takesImages} onImages={(found) => setImages([...images, ...found].slice(0, MOST_IMAGES))} onError={setError} />
        {isRunning ? (
          <button type="button" class="danger" onClick={onStop}>Stop</button>
        ) : (
          <button type="submit" class="primary" disabled={!text.trim() && !images.length}>Send</button>
        )}
      </div>
    </form>
  );
}

interface ImageProps {
  isOn: boolean;
  onImages(urls: string[]): void;
  onError(message: string): void;
}

function ImageButton({ isOn, onImages, onError }: ImageProps) {
  const input = useRef<HTMLInputElement>(null);
  const choose = async (files: FileList | null) => {
    const chosen = [...(files ?? [])].slice(0, MOST_IMAGES);
    const large = chosen.find((file) => file.size > MOST_IMAGE_BYTES);
    if (large) {
      onError(`${large.name} is larger than ${MOST_IMAGE_BYTES / 1024 / 1024} MB`);
      return;
    }
    onError("");
    onImages(await Promise.all(chosen.map(dataUrl)));
    if (input.current) input.current.value = "";
  };
  return (
    <>
      <button type="button" disabled={!isOn} onClick={() => input.current?.click()}
        title={isOn ? "Add images" : "This model takes no images"}>Image</button>
      <input ref={input} hidden type="file" accept="image/png,image/jpeg,image/webp,image/gif" multiple
        aria-label="Images" onChange={(event) => void choose(event.currentTarget.files)} />
    </>
  );
}

function dataUrl(file: File): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

interface OptionsProps {
  options: Options;
  onChange(options: Options): void;
}

export function OptionsPanel({ options, onChange }: OptionsProps) {
  const set = (name: keyof Options) => (event: { currentTarget: HTMLInputElement | HTMLTextAreaElement }) =>
    onChange({ ...options, [name]: event.currentTarget.value });
  return (
    <section class="panel" aria-label="Options and tools">
      <div class="fields">
        <label>System prompt
          <textarea rows={2} value={options.system} onInput={set("system")} placeholder="none" />
        </label>
        <label>Temperature
          <input type="number" min="0" max="2" step="any" value={options.temperature} onInput={set("temperature")} placeholder="the model's" />
        </label>
        <label>Most tokens
          <input type="number" min="1" step="1" value={options.max_tokens} onInput={set("max_tokens")} placeholder="no limit" />
        </label>
        <label class="wide">Tools, as JSON
          <textarea rows={options.tools ? 8 : 2} class="code" spellcheck={false} value={options.tools} onInput={set("tools")} placeholder="none" />
        </label>
        <p class="wide">
          <button type="button" onClick={() => onChange({ ...options, tools: options.tools ? "" : EXAMPLE_TOOLS })}>
            {options.tools ? "Remove tools" : "Example: get_weather"}
          </button>{" "}
          <span class={problem(options.tools) ? "error" : "dim"} role="status">
            {problem(options.tools) || "You answer the calls of the model yourself."}
          </span>
        </p>
      </div>
    </section>
  );
}

function problem(tools: string): string {
  try {
    parseTools(tools);
    return "";
  } catch (error) {
    return (error as Error).message;
  }
}
