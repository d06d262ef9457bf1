// All views in Chromium against a mesh with the demo model. Pictures go to SCREENSHOTS.

import assert from "node:assert/strict";
import { mkdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import { chromium } from "playwright-core";
import { ADMIN_KEY, gatewayCpu, startMesh, TENANT_KEY } from "./mesh.mjs";

const AXE = readFileSync("node_modules/axe-core/axe.min.js", "utf8");
const SCREENSHOTS = process.env.SCREENSHOTS ?? "screenshots";
const SIZES = [[1280, 800], [390, 844]];
const THEMES = ["light", "dark"];
const SERIOUS = ["serious", "critical"];
const IDLE_S = 10;
const WAIT = { timeout: 60_000 };
const HEADING = { Overview: "Services", Cache: "Prefix cache" };

let mesh;
let browser;

before(async () => {
  mkdirSync(SCREENSHOTS, { recursive: true });
  mesh = await startMesh();
  browser = await chromium.launch({
    executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
    args: ["--no-sandbox"],
  });
}, { timeout: 400_000 });

after(async () => {
  await browser?.close();
  await mesh?.stop();
});

/** A page with a key typed; `problems` collects what a good page never has. */
async function open(key, [width, height] = SIZES[0], colorScheme = "light") {
  const context = await browser.newContext({ viewport: { width, height }, colorScheme });
  const page = await context.newPage();
  const problems = [];
  page.on("pageerror", (error) => problems.push(String(error)));
  page.on("console", (message) => {
    const isRefusal = message.text().includes("the server responded with a status of 4");
    if (message.type() === "error" && !isRefusal) problems.push(message.text());
  });
  page.on("request", (request) => {
    if (!/^(data|blob):/.test(request.url()) && !request.url().startsWith(mesh.url)) problems.push(request.url());
  });
  await page.goto(`${mesh.url}/`);
  if (key) {
    await page.getByLabel("Key", { exact: true }).fill(key, WAIT);
    await page.getByLabel("Key", { exact: true }).press("Enter");
    await page.getByText("live", { exact: true }).waitFor(WAIT);
  }
  return { page, problems, close: () => context.close() };
}

async function check(page, name) {
  await sleep(300);
  await page.screenshot({ path: join(SCREENSHOTS, `${name}.png`) });
  const wide = await page.evaluate(() => document.documentElement.scrollWidth > innerWidth);
  assert.equal(wide, false, `${name} is wider than its window`);
  await page.evaluate(AXE);
  const { violations } = await page.evaluate(() => globalThis.axe.run());
  const found = violations.filter(({ impact }) => SERIOUS.includes(impact));
  const shown = found.map(({ id, nodes }) => `${id}: ${nodes.map((node) => node.html).join(" ")}`);
  assert.deepEqual(shown, [], name);
}

async function askExample(page) {
  await page.getByRole("link", { name: "Chat", exact: true }).click();
  await page.getByRole("button", { name: "What is 27 + 45?" }).click(WAIT);
  await page.locator(".answer .waterfall").waitFor(WAIT);
}

for (const size of SIZES) {
  for (const theme of THEMES) {
    test(`a chat answer and its waterfall at ${size[0]} px, ${theme}`, async () => {
      const { page, problems, close } = await open(ADMIN_KEY, size, theme);
      await askExample(page);
      console.log(`an answer and its waterfall ${((Date.now() - mesh.began_ms) / 1000).toFixed(1)} s after up began`);
      assert.match(await page.locator(".answer .text").innerText(), /27 \+ 45 = 72/);
      assert.match(await page.locator(".answer .where").innerText(), /\d ms in \d+ spans: .*%/);
      assert.match(await page.locator(".numbers").innerText(), /first token [\d.]+ ms · 11 tokens · \d+ tokens\/s/);
      await check(page, `chat-${size[0]}-${theme}`);
      await page.getByRole("link", { name: "Open this request" }).click();
      await page.locator(".one .waterfall").waitFor(WAIT);
      await check(page, `request-${size[0]}-${theme}`);
      for (const [link, name] of [["Overview", "overview"], ["Cache", "cache"], ["Tenants", "tenants"]]) {
        await page.getByRole("link", { name: link, exact: true }).click();
        await page.getByRole("heading", { name: HEADING[link] ?? link }).first().waitFor(WAIT);
        await check(page, `${name}-${size[0]}-${theme}`);
      }
      assert.deepEqual(problems, []);
      await close();
    });
  }
}

test("the page follows a chat that is longer than its window", async () => {
  const { page, close } = await open(ADMIN_KEY, [1280, 500]);
  await askExample(page);
  for (const number of [2, 3]) {
    await page.getByLabel("Message").fill("Tell me a story");
    await page.getByLabel("Message").press("Enter");
    await page.locator(".answer").nth(number - 1).locator(".waterfall").waitFor(WAIT);
    const [answer, composer] = await Promise.all([
      page.locator(".answer").nth(number - 1).boundingBox(), page.locator(".composer").boundingBox(),
    ]);
    assert.ok(answer.y + answer.height <= composer.y + 1, "the answer is behind the composer");
    assert.ok(composer.y + composer.height <= 501, "the composer is out of view");
  }
  await close();
});

test("the example about the weather is answered by a call", async () => {
  const { page, close } = await open(ADMIN_KEY);
  await page.getByRole("link", { name: "Chat", exact: true }).click();
  await page.getByRole("button", { name: "What is the weather in Paris?" }).click(WAIT);
  assert.equal(await page.locator(".call code").innerText(WAIT), "get_weather");
  assert.doesNotMatch(await page.locator(".answer").innerText(), /tool_call>/);
  await page.getByLabel("Result of get_weather").fill("18 degrees");
  await page.getByRole("button", { name: "Send result" }).click();
  await page.locator(".answer").nth(1).locator(".waterfall").waitFor(WAIT);
  assert.match(await page.locator(".answer .text").nth(1).innerText(), /\w/);
  await close();
});

test("running requests grow, and a process can be drained", async () => {
  const { page, problems, close } = await open(ADMIN_KEY);
  const headers = { Authorization: `Bearer ${TENANT_KEY}`, "Content-Type": "application/json" };
  const messages = [{ role: "user", content: "Tell me a story" }];
  const body = JSON.stringify({ model: "tokenmesh-demo", messages, ignore_eos: true, max_tokens: 900 });
  const sent = Array.from({ length: 24 }, () => fetch(`${mesh.url}/v1/chat/completions`, { method: "POST", headers, body }));
  await page.locator(".running .pill", { hasText: "generating" }).first().waitFor(WAIT);
  assert.match(await page.locator(".running li").first().innerText(), /shop/);
  const width = () => page.locator(".grow span").last().evaluate((bar) => parseFloat(bar.style.width));
  const before = await width();
  await page.setViewportSize({ width: 1280, height: 960 });
  await sleep(1500);
  assert.ok((await width()) > before);
  await check(page, "running-1280-light");
  await Promise.all(sent);
  await page.getByText("No request is running").waitFor(WAIT);
  const worker = page.locator(".service.worker .instance").first();
  await worker.getByRole("button").click();
  await worker.getByRole("button", { name: /now/ }).click();
  await page.locator(".service.worker .instance").nth(1).waitFor({ state: "detached", ...WAIT });
  assert.deepEqual(problems, []);
  await close();
});

test("requests are found by filters, and spans open by the keyboard", async () => {
  const { page, problems, close } = await open(ADMIN_KEY);
  await askExample(page);
  await page.getByRole("link", { name: "Requests", exact: true }).click();
  await page.locator(".traces li").first().waitFor(WAIT);
  await page.getByLabel("Status").selectOption("failed");
  await page.getByText("No request fits").waitFor(WAIT);
  await page.getByLabel("Status").selectOption("ok");
  await page.locator(".traces a").first().focus();
  await page.keyboard.press("Enter");
  const spans = page.locator(".one button.span");
  await spans.first().waitFor(WAIT);
  await spans.first().focus();
  await page.keyboard.press("ArrowDown");
  await page.keyboard.press("Enter");
  assert.equal(await spans.nth(1).getAttribute("aria-expanded"), "true");
  await page.locator(".one .detail").waitFor(WAIT);
  await spans.filter({ hasText: "worker.prefill" }).click();
  await page.getByText("batch_size").first().waitFor(WAIT);
  await check(page, "span-1280-light");
  assert.deepEqual(problems, []);
  await close();
});

test("a chat with tools, and two panes side by side", async () => {
  const { page, problems, close } = await open(ADMIN_KEY);
  await page.getByRole("link", { name: "Chat", exact: true }).click();
  await page.getByRole("button", { name: "Options" }).click();
  await page.getByRole("button", { name: "Example: get_weather" }).click();
  await page.getByLabel("Message").fill("What is the weather in Paris?");
  await page.getByLabel("Message").press("Enter");
  await page.getByLabel("Result of get_weather").fill("21 degrees, sunny", WAIT);
  await check(page, "tools-1280-light");
  await page.getByRole("button", { name: "Send result" }).click();
  await page.locator(".answer").nth(1).locator(".waterfall").waitFor(WAIT);
  await page.getByRole("button", { name: "Remove tools" }).click();
  await page.getByRole("button", { name: "Options" }).click();
  await page.getByRole("button", { name: "New chat" }).click();
  await page.getByRole("button", { name: "Compare" }).click();
  await page.getByRole("button", { name: "Tell me a story" }).click();
  for (const pane of [0, 1]) await page.locator(".pane").nth(pane).locator(".waterfall").waitFor(WAIT);
  await check(page, "panes-1280-light");
  assert.deepEqual(problems, []);
  await close();
});

test("images go to models that take them, and an error is shown with its trace", async () => {
  const { page, close } = await open(ADMIN_KEY);
  const states = await page.evaluate((key) => fetch("console/events?limit=1", { headers: { Authorization: `Bearer ${key}` } })
    .then((response) => response.text()), ADMIN_KEY);
  const seeing = states.replaceAll('"takes_images":false', '"takes_images":true');
  await page.route("**/console/events", (route) => route.fulfill({ contentType: "text/event-stream", body: seeing }));
  await page.reload();
  await page.getByRole("link", { name: "Chat", exact: true }).click();
  const pixel = Buffer.from("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==", "base64");
  await page.getByRole("button", { name: "Image" }).waitFor(WAIT);
  await page.locator("input[type=file]").setInputFiles({ name: "pixel.png", mimeType: "image/png", buffer: pixel });
  await page.getByRole("button", { name: "Remove image 1" }).waitFor(WAIT);
  await page.getByLabel("Message").fill("What is this?");
  const sent = page.waitForRequest((request) => request.method() === "POST");
  await page.getByRole("button", { name: "Send" }).click();
  const [image, text] = JSON.parse((await sent).postData()).messages[0].content;
  assert.match(image.image_url.url, /^data:image\/png;base64,iVBOR/);
  assert.deepEqual(text, { type: "text", text: "What is this?" });
  await page.locator(".answer .error").waitFor(WAIT);
  await page.locator(".answer .waterfall").waitFor(WAIT);
  await page.locator(".question img").waitFor(WAIT);
  await close();
});

test("a tenant sees its own requests, and text is never markup", async () => {
  const { page, problems, close } = await open(TENANT_KEY);
  const markup = "<img src=x onerror=alert(1)>";
  const sending = page.evaluate(([key, text]) => fetch("v1/chat/completions", {
    method: "POST",
    headers: { Authorization: `Bearer ${key}`, "Content-Type": "application/json", "X-Request-Id": text },
    body: JSON.stringify({ model: "tokenmesh-demo", messages: [{ role: "user", content: "Hi" }] }),
  }).then((response) => response.status), [TENANT_KEY, markup]);
  assert.equal(await sending, 200);
  await page.getByText("belongs to the tenant shop").waitFor(WAIT);
  assert.equal(await page.locator(".map").count(), 0);
  await page.getByRole("link", { name: "Requests", exact: true }).click();
  await page.locator(`.traces code[title="${markup}"]`).click(WAIT);
  await page.locator(".one .waterfall").waitFor(WAIT);
  assert.equal(await page.locator("main img").count(), 0);
  assert.equal(await page.evaluate(() => JSON.stringify(localStorage).includes("sk-")), false);
  await page.getByRole("link", { name: "Tenants", exact: true }).click();
  await page.getByRole("cell", { name: /of 100,000 left/ }).waitFor(WAIT);
  assert.equal(await page.getByRole("rowheader", { name: "operator" }).count(), 0);
  assert.deepEqual(problems, []);
  await close();
});

test("an open page costs an idle gateway less than 1 % of a core", async () => {
  const used = async () => {
    const before_s = gatewayCpu(mesh.pid);
    await sleep(1000 * IDLE_S);
    return gatewayCpu(mesh.pid) - before_s;
  };
  const without_s = await used();
  const { page, close } = await open(ADMIN_KEY);
  await page.locator(".strip").waitFor(WAIT);
  await sleep(3000);
  const with_s = await used();
  console.log(`gateway, idle: ${(100 * without_s / IDLE_S).toFixed(1)} % of a core, with a page ${(100 * with_s / IDLE_S).toFixed(1)} %`);
  assert.ok(with_s - without_s < 0.01 * IDLE_S, `${with_s - without_s} s in ${IDLE_S} s`);
  await close();
});
