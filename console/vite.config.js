import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join, relative } from "node:path";
import { defineConfig } from "vite";

const OUT = "../tokenmesh/services/gateway/core/operations/console/built";
const GATEWAY = "http://127.0.0.1:8000";
const ROOTS = ["index.html", "package.json", "package-lock.json", "vite.config.js", "src", "public"];

/** All files that a build depends on, by their paths. */
function sources(path) {
  if (/\.\w+$/.test(path)) return [path];
  return readdirSync(path).sort().flatMap((name) => sources(join(path, name)));
}

/** Records of which sources the built files were made: Python's tests check it without node. */
function recordSources() {
  return {
    name: "record-sources",
    closeBundle() {
      const lines = ROOTS.flatMap(sources).map((path) => {
        const digest = createHash("sha256").update(readFileSync(path)).digest("hex");
        return `${digest}  ${relative(".", path)}\n`;
      });
      writeFileSync(join(process.env.CONSOLE_OUT ?? OUT, "sources.sha256"), lines.join(""));
    },
  };
}

/** The page is at /console and its files are below it. */
function belowConsole() {
  return {
    name: "below-console",
    transformIndexHtml: {
      order: "post",
      handler: (html) => html.replaceAll(/(src|href)="\.\//g, '$1="console/'),
    },
  };
}

export default defineConfig({
  base: "./",
  plugins: [belowConsole(), recordSources()],
  build: {
    outDir: process.env.CONSOLE_OUT ?? OUT,
    emptyOutDir: true,
    target: "es2022",
    modulePreload: false,
    assetsInlineLimit: 0,
    rollupOptions: {
      output: {
        entryFileNames: "app.js",
        assetFileNames: "app[extname]",
        codeSplitting: false,
      },
    },
  },
  server: {
    proxy: Object.fromEntries(
      ["/v1", "/traces", "/console/events", "/mesh", "/sleep", "/wake_up"].map((path) => [path, GATEWAY]),
    ),
  },
});
