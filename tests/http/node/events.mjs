// node events.mjs URL [EVENT...]   prints what an EventSource of npm gets, an object a line; it comes back by itself.
import {createRequire} from "node:module";

const {EventSource} = createRequire(`${process.env.PACKAGES}/`)("eventsource");
const [url, ...names] = process.argv.slice(2);
const source = new EventSource(url);
const say = (event) => console.log(JSON.stringify({type: event.type, id: event.lastEventId, data: event.data}));
for (const name of ["message", ...names]) source.addEventListener(name, say);
source.addEventListener("error", (event) => console.log(JSON.stringify({type: "error", data: String(event.message)})));
