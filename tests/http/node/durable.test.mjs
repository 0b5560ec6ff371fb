// vitest run durable.test.mjs   the protocol's own tests for servers, against $SERVER.
const {runConformanceTests} = await import(
  `${process.env.PACKAGES}/@durable-streams/server-conformance-tests/dist/index.js`
);
runConformanceTests({baseUrl: process.env.SERVER});
