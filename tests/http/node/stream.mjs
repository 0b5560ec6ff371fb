// node stream.mjs URL [HEADER VALUE]   prints the lines of a body as they come.
const [url, name, value] = process.argv.slice(2);
const answer = await fetch(url, {headers: name ? {[name]: value} : {}});
const decoder = new TextDecoder();
let rest = "";
for await (const part of answer.body) {
  rest += decoder.decode(part, {stream: true});
  const lines = rest.split("\n");
  rest = lines.pop();
  for (const line of lines) console.log(JSON.stringify({type: String(answer.status), data: line}));
}
console.log(JSON.stringify({type: "end", data: rest}));
