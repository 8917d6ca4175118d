// Requests to the server: API key, error messages, and whether the server can be reached.
const KEY_ITEM = "bertsmith-api-key";
const PROBE_SECONDS = 5;
const POLL_SECONDS = 2;
// Header with the share of [UNK] tokens in the texts of a request.
const UNKNOWN_SHARE = "X-Bertsmith-Unknown-Share";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export class UnreachableError extends Error {}

// Dispatches "unreachable" and "reachable".
export const connection = new EventTarget();
let isPolling = false;

export function getKey() {
  return sessionStorage.getItem(KEY_ITEM);
}

export function setKey(key) {
  sessionStorage.setItem(KEY_ITEM, key);
}

// URL of an endpoint, also behind a proxy that adds a path.
export function endpointUrl(path) {
  return new URL(path, document.baseURI).href;
}

// Send a GET request, or a POST request if there is a body. Return {value, unknownShare}.
export async function request(path, body, signal) {
  const headers = {};
  // Header values are bytes in JavaScript, and the server expects UTF-8.
  if (getKey()) headers.Authorization = `Bearer ${toByteString(getKey())}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const options = { headers, signal, method: body === undefined ? "GET" : "POST", cache: "no-store",
    body: body === undefined ? undefined : JSON.stringify(body) };
  const probe = setTimeout(checkHealth, 1000 * PROBE_SECONDS);
  try {
    const response = await fetch(endpointUrl(path), options);
    const text = await response.text();
    if (!response.ok) throw toError(response, text);
    const share = Number(response.headers.get(UNKNOWN_SHARE) ?? 0);
    return { value: JSON.parse(text), unknownShare: share };
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    if (!(error instanceof UnreachableError || error instanceof TypeError)) throw error;
    pollUntilReachable();
    throw error instanceof UnreachableError ? error : new UnreachableError("the server does not respond");
  } finally {
    clearTimeout(probe);
  }
}

function toError(response, text) {
  try {
    return new ApiError(response.status, JSON.parse(text).error.message);
  } catch {
    // A proxy answers in another format if the server is down.
    const message = `the server answered with status ${response.status}`;
    if (response.status >= 502 && response.status <= 504) return new UnreachableError(message);
    return new ApiError(response.status, message);
  }
}

function toByteString(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}

async function isHealthy() {
  try {
    const signal = AbortSignal.timeout(1000 * PROBE_SECONDS);
    return (await fetch(endpointUrl("health"), { signal, cache: "no-store" })).ok;
  } catch {
    return false;
  }
}

// Called while a request takes long: it may wait for a slow model, or for a lost connection.
async function checkHealth() {
  if (!(await isHealthy())) pollUntilReachable();
}

async function pollUntilReachable() {
  if (isPolling) return;
  isPolling = true;
  connection.dispatchEvent(new Event("unreachable"));
  do {
    await new Promise((resolve) => setTimeout(resolve, 1000 * POLL_SECONDS));
  } while (!(await isHealthy()));
  isPolling = false;
  connection.dispatchEvent(new Event("reachable"));
}
