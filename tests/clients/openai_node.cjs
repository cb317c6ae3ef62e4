// The official openai package for Node at every endpoint: prints what it got as JSON.
const OpenAI = require("openai");

const SAID = [{ role: "user", content: "count the lines of a file" }];
const SCHEMA = { type: "object", properties: { lines: { type: "integer", minimum: 0, maximum: 99 } }, required: ["lines"], additionalProperties: false };
const TOOL = { type: "function", function: { name: "count", parameters: SCHEMA } };

async function main() {
  const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0, timeout: 60000 });
  const chat = { model: "code", messages: SAID, max_tokens: 30, temperature: 0.8, seed: 5 };
  const completion = { model: "code", prompt: "import os\n", max_tokens: 30, temperature: 0.8, seed: 6 };
  const got = { models: [], chat_stream: "", completion_stream: "" };
  for await (const model of await client.models.list()) got.models.push(model.id);
  got.model = (await client.models.retrieve("code")).owned_by;
  got.chat = (await client.chat.completions.create(chat)).choices[0].message.content;
  const stream = await client.chat.completions.create({ ...chat, stream: true, stream_options: { include_usage: true } });
  for await (const chunk of stream) {
    got.chat_stream += chunk.choices[0]?.delta.content ?? "";
    got.usage = chunk.usage;
  }
  got.completion = (await client.completions.create(completion)).choices[0].text;
  for await (const chunk of await client.completions.create({ ...completion, stream: true })) got.completion_stream += chunk.choices[0].text;
  // Enough for all white space that a grammar allows.
  const schema = { model: "code", messages: SAID, max_tokens: 700, temperature: 0.7, seed: 6 };
  const form = { type: "json_schema", json_schema: { name: "file", schema: SCHEMA, strict: true } };
  got.schema = JSON.parse((await client.chat.completions.create({ ...schema, response_format: form })).choices[0].message.content);
  const asked = { tools: [TOOL], tool_choice: { type: "function", function: { name: "count" } } };
  got.call = JSON.parse((await client.chat.completions.create({ ...schema, ...asked })).choices[0].message.tool_calls[0].function.arguments);
  const told = await client.chat.completions.create({ ...chat, logprobs: true, top_logprobs: 2, speculation: { mode: "off" } });
  got.log_probs = told.choices[0].logprobs.content.map((one) => one.top_logprobs.length);
  got.mode_off = told.choices[0].message.content;
  const root = new OpenAI({ baseURL: process.argv[2].replace(/\/v1$/, ""), apiKey: "none" });
  const tokens = (await root.post("/tokenize", { body: { prompt: "import os\n" } })).tokens;
  got.detokenized = (await root.post("/detokenize", { body: { tokens } })).prompt;
  got.refused = [];
  for (const [kind, fields] of [[OpenAI.NotFoundError, { model: "none" }], [OpenAI.BadRequestError, { top_p: 7 }]]) {
    try {
      await client.chat.completions.create({ ...chat, ...fields });
    } catch (error) {
      if (!(error instanceof kind)) throw error;
      got.refused.push([error.status, error.param]);
    }
  }
  console.log(JSON.stringify(got));
}

main();
