import { useEffect, useState } from "preact/hooks";

const NAME = "tokenmesh.theme";
const NEXT = { auto: "light", light: "dark", dark: "auto" } as const;
const SIGN = { auto: "◐", light: "☀", dark: "☾" } as const;
type Theme = keyof typeof NEXT;

function saved(): Theme {
  const found = localStorage.getItem(NAME);
  return found === "light" || found === "dark" ? found : "auto";
}

/** Follows the system's preference unless the user has chosen. */
export function ThemeSwitch() {
  const [theme, setTheme] = useState<Theme>(saved);
  useEffect(() => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    localStorage.setItem(NAME, theme);
  }, [theme]);
  return (
    <button class="quiet icon" onClick={() => setTheme(NEXT[theme])}
      aria-label={`Colors: ${theme}. Switch to ${NEXT[theme]}`} title={`Colors: ${theme}`}>
      <span aria-hidden="true">{SIGN[theme]}</span>
    </button>
  );
}
