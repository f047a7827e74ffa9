// llama.cpp, as npm's node-llama-cpp ships it, asked by tests/test_export_gguf.py:
//     node tests/llama_cpp.mjs NODE_MODULES MODEL.gguf request.json answer.json
// request: texts to tokenize; prompts, token ids to continue greedily by `count` tokens; scored, token ids whose nats are
// asked for, from the second on; messages, to be rendered with the file's chat template.
import fs from "node:fs";
import path from "node:path";

const [folder, file, asked, answered] = process.argv.slice(2);
const api = await import(path.resolve(folder, "node-llama-cpp/dist/index.js"));
const request = JSON.parse(fs.readFileSync(asked, "utf8"));
const llama = await api.getLlama({ gpu: false, build: "never", logLevel: "error", progressLogs: false });
const model = await llama.loadModel({ modelPath: file });
const context = await model.createContext({ contextSize: model.trainContextSize, threads: 1 });
const sequence = context.getSequence();
const answer = { texts: [], prompts: [], scored: [] };

for (const text of request.texts ?? []) {
  answer.texts.push({ ids: model.tokenize(text, false), special: model.tokenize(text, true) });
}

for (const ids of request.prompts ?? []) {
  await sequence.clearHistory();
  const found = [];
  for await (const token of sequence.evaluate(ids, { temperature: 0, yieldEogToken: true })) {
    found.push(token);
    if (found.length === request.count) break;
  }
  answer.prompts.push(found);
}

for (const ids of request.scored ?? []) {
  await sequence.clearHistory();
  const inputs = ids.slice(0, -1).map((id, i) => {
    const logits = { filter: { tokens: [ids[i + 1]], includeTop: 1 } };
    return [id, { generateNext: { logits, totalLogitWeight: true, options: { temperature: 0 } } }];
  });
  const results = await sequence.controlledEvaluate(inputs);
  answer.scored.push(results.map(({ next }, i) => {
    const most = Math.max(...next.logits.values());
    return Math.log(next.totalLogitWeight) + most - next.logits.get(ids[i + 1]);
  }));
}

answer.special = { bos: model.tokens.bos, eos: model.tokens.eos };
answer.architecture = model.fileInfo.metadata.general.architecture;
if (request.messages) {
  const { Template } = await import(path.resolve(folder, "@huggingface/jinja/dist/index.js"));
  const template = new Template(model.fileInfo.metadata.tokenizer.chat_template);
  answer.rendered = template.render({ messages: request.messages, add_generation_prompt: true });
}
fs.writeFileSync(answered, JSON.stringify(answer));
process.exit(0);
