// A mesh as a user starts it, with a key of an admin and one of a tenant.

import { spawn } from "node:child_process";
import { createHash } from "node:crypto";
import { mkdtempSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";

const READY_MS = 300_000;
export const ADMIN_KEY = "sk-console-admin";
export const TENANT_KEY = "sk-console-tenant";

function freePort() {
  return new Promise((resolve) => {
    const server = createServer();
    server.listen(0, "127.0.0.1", () => {
      const { port } = server.address();
      server.close(() => resolve(port));
    });
  });
}

function keysFile(folder) {
  const digest = (key) => createHash("sha256").update(key).digest("hex");
  const entry = (key, tenant) => `[[keys]]\nsha256 = "${digest(key)}"\ntenant = "${tenant}"\n`;
  const path = join(folder, "keys.toml");
  writeFileSync(path, `[tenants.operator]\nadmin = true\n[tenants.shop]\nmonthly_tokens = 100000\n${
    entry(ADMIN_KEY, "operator")}${entry(TENANT_KEY, "shop")}`);
  return path;
}

/** Starts `tokenmesh up`; `stop` ends it. */
export async function startMesh() {
  const began_ms = Date.now();
  const folder = mkdtempSync(join(tmpdir(), "console-"));
  const port = await freePort();
  const words = ["up", "tokenmesh-demo", "--port", port, "--workers", "2", "--enable-admin-routes", "--keys-file", keysFile(folder)];
  const child = spawn(process.env.TOKENMESH ?? "tokenmesh", words.map(String), { stdio: ["ignore", "pipe", "pipe"] });
  let output = "";
  child.stdout.on("data", (data) => (output += data));
  child.stderr.on("data", (data) => (output += data));
  const stop = () => new Promise((resolve) => {
    if (child.exitCode !== null) return resolve();
    child.once("exit", resolve);
    child.kill("SIGINT");
    setTimeout(() => child.kill("SIGKILL"), 20_000).unref();
  });
  while (!output.includes("TokenMesh is ready")) {
    if (child.exitCode !== null || Date.now() - began_ms > READY_MS) {
      await stop();
      throw new Error(`the mesh did not start:\n${output}`);
    }
    await sleep(100);
  }
  return { url: `http://127.0.0.1:${port}`, began_ms, pid: child.pid, stop, output: () => output };
}

/** Seconds of CPU that the gateway's process has used. */
export function gatewayCpu(parent) {
  for (const pid of readdirSync("/proc").filter((name) => /^\d+$/.test(name))) {
    try {
      const stat = readFileSync(`/proc/${pid}/stat`, "utf8").split(") ").pop().split(" ");
      const words = readFileSync(`/proc/${pid}/cmdline`, "utf8").split("\0");
      if (Number(stat[1]) === parent && words.includes("gateway")) return (Number(stat[11]) + Number(stat[12])) / 100;
    } catch {
      // The process has ended meanwhile.
    }
  }
  throw new Error("the gateway's process was not found");
}
