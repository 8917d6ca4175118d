// A request as a curl command, and as a Python program.
const KEY_VARIABLE = "BERTSMITH_API_KEY";

function quoteForShell(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

export function toCurl(url, body, needsKey) {
  const key = needsKey ? ` \\\n  -H "Authorization: Bearer $${KEY_VARIABLE}"` : "";
  const data = quoteForShell(JSON.stringify(body));
  return `curl -s ${quoteForShell(url)}${key} \\\n  -H 'Content-Type: application/json' \\\n  -d ${data}\n`;
}

// A JSON value as a Python literal. JSON's strings are also strings in Python.
function toLiteral(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(toLiteral).join(", ")}]`;
  if (typeof value === "object") {
    const items = Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${toLiteral(item)}`);
    return `{${items.join(", ")}}`;
  }
  return JSON.stringify(value);
}

export function toPython(url, body, needsKey) {
  const header = `{"Authorization": "Bearer " + os.environ["${KEY_VARIABLE}"]}`;
  const rows = [
    ...(needsKey ? ["import os", ""] : []),
    "import requests",
    "",
    "response = requests.post(",
    `    ${JSON.stringify(url)},`,
    ...(needsKey ? [`    headers=${header},`] : []),
    `    json=${toLiteral(body)},`,
    ")",
    "response.raise_for_status()",
    "print(response.json())",
    "",
  ];
  return rows.join("\n");
}

// Copy a text to the clipboard; return whether it worked.
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Browsers allow the clipboard API only over HTTPS and on localhost.
    const field = document.createElement("textarea");
    field.value = text;
    document.body.append(field);
    field.select();
    const isCopied = document.execCommand("copy");
    field.remove();
    return isCopied;
  }
}
