import { useState } from "preact/hooks";

interface Props {
  error: string;
  current: string;
  onKey(key: string): void;
}

/** The key stays in this tab's session storage; it is sent to this gateway and nowhere else. */
export function KeyForm({ error, current, onKey }: Props) {
  const [key, setKey] = useState("");
  return (
    <section class="panel key" aria-labelledby="key-title">
      <h2 id="key-title">API key</h2>
      <p class="dim">
        Kept in this tab until it is closed. A key shows the requests of its tenant; an admin key
        shows the whole mesh.
      </p>
      {error && <p class="error" role="alert">{error}</p>}
      <form onSubmit={(event) => {
        event.preventDefault();
        onKey(key.trim());
      }}>
        <label for="api-key">Key</label>
        <input id="api-key" type="password" autocomplete="off" value={key} autofocus
          onInput={(event) => setKey(event.currentTarget.value)} />
        <button type="submit" class="primary" disabled={!key.trim()}>Use key</button>
        {current && <button type="button" onClick={() => onKey("")}>Forget key</button>}
      </form>
    </section>
  );
}
