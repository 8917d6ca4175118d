// Find out which languages a model knows, to show examples that make sense.
import { request } from "./api.js";

// The same sentence in each language that has examples.
const SENTENCES = {
  en: "The children went to school in the morning and read a book about the history of the city.",
  ko: "아이들은 아침에 학교에 가서 도시의 역사에 대한 책을 읽었다.",
};
// A known language has at most this share of [UNK] tokens, and at most this many times as many
// tokens as the best one: a vocabulary of another language splits words into characters.
const MAX_UNKNOWN_SHARE = 0.1;
const MAX_TOKEN_RATIO = 2;
const UNKNOWN_TOKENS = new Set(["[UNK]", "<unk>"]);

const cache = new Map();

export function isUnknown(token) {
  return UNKNOWN_TOKENS.has(token.text);
}

// The languages that a model knows, best first; English if it knows none of them.
export function findLanguages(model) {
  if (!cache.has(model)) cache.set(model, tokenizeSentences(model));
  return cache.get(model);
}

async function tokenizeSentences(model) {
  const languages = Object.keys(SENTENCES);
  const body = { model, inputs: Object.values(SENTENCES), add_special_tokens: false };
  try {
    return rankLanguages(languages, (await request("tokenize", body)).value);
  } catch {
    cache.delete(model);
    return ["en"];
  }
}

function rankLanguages(languages, tokenLists) {
  const candidates = languages
    .map((language, index) => {
      const tokens = tokenLists[index];
      const unknownShare = tokens.filter(isUnknown).length / Math.max(tokens.length, 1);
      return { language, count: tokens.length, unknownShare };
    })
    .filter((candidate) => candidate.count > 0 && candidate.unknownShare <= MAX_UNKNOWN_SHARE)
    .sort((one, other) => one.count - other.count);
  const known = candidates.filter((candidate) => candidate.count <= MAX_TOKEN_RATIO * candidates[0].count);
  return known.length > 0 ? known.map((candidate) => candidate.language) : ["en"];
}
