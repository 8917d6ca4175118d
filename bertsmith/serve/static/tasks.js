// The tabs: fields, request and result of each.
import { renderAttention } from "./attention.js";
import { createAttributionView } from "./attributions.js";
import { bars, highlight, lines, notice, percent, plural, section } from "./dom.js";
import { renderSimilarity } from "./similarity.js";
import { renderWord } from "./word.js";

const NUM_PREDICTIONS = 8;
// Attention matrices of all heads are max-pooled to this many rows and columns.
const MAX_CELLS = 40;
const TRUNCATED = "The text was truncated to the model's maximum length.";

// A text, or a pair if the second text is not empty.
const textOrPair = (text, second) => (second.trim() ? [text, second] : text);

function nameLabel(model, label) {
  return model.label_names?.[label] ?? label;
}

function renderFill(masks, { values }) {
  const characters = Array.from(values.text);
  const filled = [];
  const spans = [];
  let position = 0;
  for (const { start, predictions } of masks) {
    filled.push(...characters.slice(position, start));
    let [word] = predictions[0];
    const before = filled.at(-1) ?? " ";
    if (word.startsWith("##") && before.trim()) word = word.slice(2);
    spans.push({ start: filled.length, end: filled.length + Array.from(word).length, hue: 0 });
    filled.push(...Array.from(word));
    position = start + "[MASK]".length;
  }
  filled.push(...characters.slice(position));
  return [
    highlight(filled.join(""), spans),
    ...masks.map(({ predictions }, index) =>
      section(masks.length > 1 ? `Mask ${index + 1}` : "Predictions", bars(predictions))),
  ];
}

function renderPair({ next_sentence_probability: probability, num_removed_tokens: numRemoved }) {
  const follows = probability >= 0.5;
  const rows = [["B follows A", probability], ["B does not follow A", 1 - probability]];
  return [
    section(rows[follows ? 0 : 1][0], bars(rows, follows ? 0 : 1)),
    numRemoved > 0 ? notice(`${plural(numRemoved, "token")} removed, so that the pair fits the model.`) : null,
  ];
}

function renderClassify({ labels, score, truncated }, context) {
  const { body, model } = context;
  const note = truncated ? notice(TRUNCATED) : null;
  const attributions = createAttributionView({ model: body.model, inputs: body.inputs[0] }, context,
    (label) => nameLabel(model, label));
  if (score !== undefined) {
    const output = document.createElement("output");
    output.textContent = score.toFixed(3);
    return [section("Score", output), note, attributions];
  }
  const rows = labels.map((row) => [nameLabel(model, row.label), row.score]);
  return [section(rows[0][0], bars(rows)), note, attributions];
}

function renderTag(spans, { model, values }) {
  const labels = [...new Set(spans.map((span) => span.label))].sort();
  const marks = spans.map((span) => ({
    start: span.start,
    end: span.end,
    label: `${nameLabel(model, span.label)} ${Math.round(100 * span.probability)} %`,
    hue: labels.indexOf(span.label),
  }));
  return [
    highlight(values.text, marks),
    spans.length === 0 ? notice("The model finds no entity in this text.") : null,
  ];
}

function renderAnswer(answer, { values }) {
  const hasAnswer = answer.start !== null;
  const spans = hasAnswer
    ? [{ start: answer.start, end: answer.end, label: percent(answer.probability), hue: 0 }]
    : [];
  const rows = answer.candidates.map((span) => [span.text || "(no answer)", span.probability]);
  const best = answer.candidates.findIndex((span) => span.start === answer.start && span.end === answer.end);
  return [
    section(hasAnswer ? answer.text : "The context gives no answer", highlight(values.context, spans)),
    section("Candidates", bars(rows, best)),
    answer.truncated ? notice(TRUNCATED) : null,
  ];
}

function renderChoose(choice, { values }) {
  const endings = lines(values.endings);
  const rows = endings.map((ending, index) => [ending, choice.probabilities[index]]);
  return [
    section(endings[choice.best_index], bars(rows, choice.best_index)),
    choice.truncated ? notice(TRUNCATED) : null,
  ];
}

function renderRerank(ranking, { values }) {
  const texts = lines(values.texts);
  return [section("Most relevant first", bars(ranking.map(({ index, score }) => [texts[index], score])))];
}

// Each tab has: the task that a model needs (and optionally which models come first), the endpoint, the fields, the request body without
// the model, the texts whose tokens are shown, and the elements that show the response.
export const TABS = [
  {
    id: "fill", title: "Fill in", task: "fill", path: "fill", button: "Fill in",
    sentence: "The most probable words for each [MASK].",
    fields: [{ name: "text", label: "Text with [MASK]", rows: 3 }],
    body: ({ text }) => ({ inputs: text, top: NUM_PREDICTIONS }),
    texts: ({ text }) => [["Text", text, true]],
    render: ({ masks }, context) => renderFill(masks, context),
  },
  {
    id: "pair", title: "Next sentence", task: "pair", path: "pair", button: "Does B follow A?",
    sentence: "The probability that the second text follows the first.",
    fields: [{ name: "a", label: "Text A", rows: 2 }, { name: "b", label: "Text B", rows: 2 }],
    body: ({ a, b }) => ({ inputs: [a, b] }),
    texts: ({ a, b }) => [["Text A", a], ["Text B", b]],
    render: renderPair,
  },
  {
    id: "classify", title: "Classify", task: "classify", path: "classify", button: "Classify",
    sentence: "The label or score of a text, or of a pair of texts.",
    fields: [{ name: "text", label: "Text", rows: 3 },
      { name: "second", label: "Second text", rows: 2, hint: "only for models of pairs" }],
    body: ({ text, second }) => ({ inputs: [textOrPair(text, second)] }),
    texts: ({ text, second }) => [["Text", text], ["Second text", second]],
    render: ([prediction], context) => renderClassify(prediction, context),
  },
  {
    id: "tag", title: "Entities", task: "tag", path: "tag", button: "Find them",
    sentence: "The entities of a text, or the tag of each word.",
    fields: [{ name: "text", label: "Text", rows: 3 }],
    body: ({ text }) => ({ inputs: text }),
    texts: ({ text }) => [["Text", text]],
    render: renderTag,
  },
  {
    id: "answer", title: "Answer", task: "answer", path: "answer", button: "Answer",
    sentence: "The answer to a question, extracted from a context.",
    fields: [{ name: "question", label: "Question", rows: 1 }, { name: "context", label: "Context", rows: 5 }],
    body: ({ question, context }) => ({ inputs: { question, context } }),
    texts: ({ question, context }) => [["Question", question], ["Context", context]],
    render: renderAnswer,
  },
  {
    id: "choose", title: "Choose", task: "choose", path: "choose", button: "Choose",
    sentence: "The most plausible of several endings.",
    fields: [{ name: "prompt", label: "Beginning", rows: 2 },
      { name: "endings", label: "Endings", rows: 4, hint: "one per line, two or more" }],
    body: ({ prompt, endings }) => ({ inputs: { prompt, endings: lines(endings) } }),
    texts: ({ prompt, endings }) => [["Beginning", prompt], ...lines(endings).map((line, i) => [`Ending ${i + 1}`, line])],
    render: renderChoose,
  },
  {
    id: "rerank", title: "Rerank", task: "rerank", path: "rerank", button: "Rerank",
    sentence: "Texts in the order of their relevance to a query.",
    fields: [{ name: "query", label: "Query", rows: 1 },
      { name: "texts", label: "Texts", rows: 6, hint: "one per line" }],
    body: ({ query, texts }) => ({ query, texts: lines(texts) }),
    texts: ({ query, texts }) => [["Query", query], ...lines(texts).map((line, index) => [`${index + 1}`, line])],
    render: renderRerank,
  },
  {
    id: "similarity", title: "Similarity", task: "embed", path: "similarity", button: "Compare",
    sentence: "The similarity of the vectors of several texts.",
    fields: [{ name: "texts", label: "Texts", rows: 6, hint: "one per line, two or more" }],
    // A model that only embeds was trained for it.
    prefers: ({ tasks }) => tasks.every((task) => ["embed", "inspect"].includes(task)),
    body: ({ texts }) => ({ inputs: lines(texts) }),
    texts: ({ texts }) => lines(texts).map((line, index) => [`${index + 1}`, line]),
    render: renderSimilarity,
  },
  {
    id: "word", title: "One word", task: "inspect", path: "word_distances", button: "Compare",
    sentence: "The vectors of one word in several sentences, layer by layer.",
    fields: [{ name: "word", label: "Word", rows: 1 },
      { name: "texts", label: "Sentences with the word", rows: 6, hint: "one per line" }],
    body: ({ word, texts }) => ({ inputs: lines(texts), word }),
    texts: ({ texts }) => lines(texts).map((line, index) => [`${index + 1}`, line]),
    render: renderWord,
  },
  {
    id: "attention", title: "Attention", task: "inspect", path: "attention", button: "Show attention",
    sentence: "What each token attends to, for every head.",
    fields: [{ name: "text", label: "Text", rows: 3 },
      { name: "second", label: "Second text", rows: 1, hint: "may be empty" }],
    body: ({ text, second }) => ({ inputs: textOrPair(text, second), max_cells: MAX_CELLS }),
    texts: ({ text, second }) => [["Text", text], ["Second text", second]],
    render: renderAttention,
  },
];
