// The Vercel AI SDK: text, a stream, a tool, an object, embeddings.
import assert from 'node:assert'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { embedMany, generateText, jsonSchema, Output, streamText, tool } from 'ai'

const { TOKENMESH_URL, CHAT_MODEL, EMBEDDING_MODEL } = process.env
const provider = createOpenAICompatible({
  name: 'tokenmesh',
  baseURL: `${TOKENMESH_URL}/v1`,
  includeUsage: true,
  supportsStructuredOutputs: true
})
const model = provider(CHAT_MODEL)
const prompt = 'What is 27 + 45?'

const { text, usage } = await generateText({ model, prompt })
assert(text.includes('72'), text)
assert(usage.totalTokens > 0)

let streamed = ''
for await (const part of streamText({ model, prompt }).textStream) streamed += part
assert.equal(streamed, text)

const numbers = jsonSchema({
  type: 'object',
  properties: { a: { type: 'integer' }, b: { type: 'integer' } },
  required: ['a', 'b'],
  additionalProperties: false
})
const add = tool({ description: 'Adds.', inputSchema: numbers, execute: ({ a, b }) => a + b })
const called = await generateText({ model, prompt, tools: { add }, toolChoice: 'required' })
assert.equal(called.toolCalls[0].toolName, 'add')

const { output } = await generateText({ model, prompt, output: Output.object({ schema: numbers }) })
assert.equal(typeof output.a, 'number')

const embedder = provider.textEmbeddingModel(EMBEDDING_MODEL)
const { embeddings } = await embedMany({ model: embedder, values: ['a fox', 'a stone'] })
assert.equal(embeddings.length, 2)
