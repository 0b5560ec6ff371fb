// The ends of the peers that run in node: see peers.py, which starts them and says what to do, as it does with Python's.
'use strict';

const { performance } = require('perf_hooks');
const path = require('path');
const modules = path.join(__dirname, '..', '.cache', 'node', 'node_modules');
const load = name => require(path.join(modules, name));

const spec = JSON.parse(process.argv[2]);
const ELEMENTS = 8192, ELEMENT_BYTES = 2048; // of qlobber-fsq's disruptor
const IN_FLIGHT = 16; // publishes of qlobber-fsq that are under way at once

const now = () => performance.timeOrigin / 1000 + performance.now() / 1000;
const say = line => process.stdout.write(`${line}\n`);

let told = () => {};
process.stdin.on('data', () => told());
process.stdin.on('end', () => process.exit(1));
const line = () => new Promise(done => { told = done; });

function bodyOf(number) {
    const body = Buffer.alloc(spec.size);
    body.write(String(number).padStart(8, '0'), 'latin1');
    return body;
}

class Seen {
    constructor(count) {
        this.count = count;
        this.heard = this.disordered = 0;
        this.found = new Uint8Array(count);
    }

    // False: that was the last.
    see(body) {
        const number = Number(body.toString('latin1', 0, 8));
        if (number !== this.heard) {
            this.disordered += 1;
        }
        this.found[number] += 1;
        this.heard += 1;
        return this.heard < this.count;
    }

    wrong() {
        return this.found.reduce((wrong, times) => wrong + (times === 1 ? 0 : 1), 0);
    }
}

// ---------------------------------------------------------------- the bare ring

function disruptor(name, consumer, init) {
    const { Disruptor } = load('shared-memory-disruptor');
    return new Disruptor(`/${name}`, 65536, spec.size, spec.takers, consumer, init, true);
}

const bare = {
    prepare() {
        for (const name of [spec.name, `${spec.name}a`, `${spec.name}b`]) {
            disruptor(name, 0, true);
        }
    },

    async open() {
        if (spec.role === 'send' || spec.role === 'hear') {
            this.ring = disruptor(spec.name, spec.index, false);
        } else {
            const [there, back] = spec.role === 'ping' ? ['a', 'b'] : ['b', 'a'];
            this.there = disruptor(spec.name + there, 1, false);
            this.back = disruptor(spec.name + back, 0, false);
        }
    },

    put(ring, body) {
        body.copy(ring.produceClaimSync());
        ring.produceCommitSync();
    },

    async send() {
        const body = bodyOf(0);
        for (let number = 0; number < spec.count; number += 1) {
            body.write(String(number).padStart(8, '0'), 'latin1');
            this.put(this.ring, body);
        }
    },

    async hear(seen) {
        for (let more = true; more;) {
            for (const found of this.ring.consumeNewSync()) {
                for (let at = 0; at < found.length; at += spec.size) {
                    more = seen.see(Buffer.from(found.subarray(at, at + spec.size)));
                }
            }
            this.ring.consumeCommit();
        }
    },

    take(ring) {
        const [found] = ring.consumeNewSync();
        const body = Buffer.from(found);
        ring.consumeCommit();
        return body;
    },

    async ping(took) {
        for (let number = 0; number < spec.count; number += 1) {
            const begun = performance.now();
            this.put(this.there, bodyOf(number));
            this.take(this.back);
            took.push((performance.now() - begun) * 1000);
        }
    },

    async echo() {
        for (let number = 0; number < spec.count; number += 1) {
            this.put(this.there, this.take(this.back));
        }
    },
};

// ---------------------------------------------------------------- qlobber-fsq

function sharedRing(init) {
    const { Disruptor } = load('shared-memory-disruptor');
    const spin = false; // it tries again by itself
    // Who only publishes counts as well: without watching it would write files.
    const consumers = spec.takers + 1;
    return new Disruptor(`/${spec.name}f`, ELEMENTS, ELEMENT_BYTES, consumers, spec.index, init, spin);
}

const fsq = {
    prepare() {
        if (spec.what === 'shared') {
            sharedRing(true);
        }
    },

    async open() {
        const { QlobberFSQ } = load('qlobber-fsq');
        const options = { fsq_dir: path.join(spec.where, spec.name) };
        if (spec.what === 'shared') {
            const ring = sharedRing(false);
            // As fast as it gets: one bucket, no file that is written to and watched for changes, but polls.
            Object.assign(options, {
                get_disruptor: () => ring, bucket_base: 1, bucket_num_chars: 1, bucket_stamp_size: 0, poll_interval: 1,
                handler_concurrency: 1000, message_concurrency: 1000,
            });
        }
        this.options = { ephemeral: spec.what === 'shared' };
        this.fsq = new QlobberFSQ(options);
        this.fsq.on('warning', () => {});
        await new Promise((done, fail) => {
            this.fsq.once('error', fail);
            this.fsq.once('start', done);
        });
        if (spec.what !== 'shared' && (spec.role === 'send' || spec.role === 'put')) {
            await new Promise(done => this.fsq.stop_watching(done));
            return;
        }
        this.waiting = [];
        this.came = body => this.waiting.push(body);
        const topic = { hear: 's', ping: 'b', echo: 'a', send: 'nothing' }[spec.role];
        await new Promise((done, fail) =>
            this.fsq.subscribe(topic, body => this.came(body), error => (error ? fail(error) : done())));
    },

    publish(topic, body) {
        return new Promise((done, fail) =>
            this.fsq.publish(topic, body, this.options, error => (error ? fail(error) : done())));
    },

    async sendAll(inFlight) {
        let next = spec.first || 0;
        const end = next + spec.count;
        const one = async () => {
            while (next < end) {
                const number = next;
                next += 1;
                await this.publish('s', bodyOf(number));
            }
        };
        await Promise.all(Array.from({ length: inFlight }, one));
    },

    async send() {
        await this.sendAll(IN_FLIGHT);
    },

    async put() {
        await this.sendAll(spec.batch);
    },

    hear(seen) {
        return new Promise(done => {
            let more = true;
            this.came = body => {
                if (more && !(more = seen.see(body))) {
                    done();
                }
            };
            const already = this.waiting.splice(0);
            already.forEach(this.came);
        });
    },

    async ping(took) {
        for (let number = 0; number < spec.count; number += 1) {
            const begun = performance.now();
            const back = new Promise(done => { this.came = done; });
            await this.publish('a', bodyOf(number));
            await back;
            took.push((performance.now() - begun) * 1000);
        }
    },

    echo() {
        return new Promise(done => {
            let heard = 0;
            this.came = async body => {
                await this.publish('b', body);
                heard += 1;
                if (heard === spec.count) {
                    done();
                }
            };
        });
    },
};

// ---------------------------------------------------------------- what all do

async function main() {
    const way = spec.what === 'disruptor' ? bare : fsq;
    if (spec.role === 'prepare') {
        way.prepare();
        process.exit(0);
    }
    await way.open();
    say('ready');
    await line();
    const seen = new Seen(spec.count);
    const took = [];
    const begun = now();
    if (spec.role === 'hear') {
        await way.hear(seen);
    } else {
        await way[spec.role](took);
    }
    const result = { begun, ended: now(), took };
    if (spec.role === 'hear') {
        Object.assign(result, { disordered: seen.disordered, wrong: seen.wrong() });
    }
    say(JSON.stringify(result));
    await line();
    process.exit(0);
}

main().catch(error => {
    process.stderr.write(`${error.stack}\n`);
    process.exit(1);
});
