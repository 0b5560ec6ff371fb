// A process of qlobber-fsq: a command a line on standard input, an event a line on standard output. Its argument is
// the options of QlobberFSQ, and `late_ms`, by which its clock is off.
'use strict';

const crypto = require('crypto');
const path = require('path');
const readline = require('readline');

const options = JSON.parse(process.argv[2]);
const late = options.late_ms || 0;
if (late) {
    const now = Date.now;
    Date.now = () => now() + late;
}
const { QlobberFSQ } = require(path.join(process.env.PACKAGES, 'qlobber-fsq'));

const say = event => process.stdout.write(`${JSON.stringify(event)}\n`);
const digest = data => crypto.createHash('sha256').update(data).digest('hex');
const fsq = new QlobberFSQ(options);
fsq.on('error', error => say({ type: 'error', text: String(error) }));
fsq.on('warning', error => { if (error && error.code !== 'EAGAIN') say({ type: 'warning', text: String(error) }); });
fsq.on('single_disabled', error => say({ type: 'single_disabled', text: String(error) }));
fsq.on('start', () => say({ type: 'start' }));

function bodyOf(command) {
    return command.body !== undefined ? command.body : Buffer.alloc(command.size, command.fill || 'x');
}

function describe(data, info) {
    const { topic, single, expires, fname } = info;
    const text = data.length <= 64 ? data.toString() : undefined;
    return { type: 'message', topic, single, expires, fname, size: data.length, digest: digest(data), body: text };
}

function publish(command, done) {
    const { topic, ttl, single } = command;
    fsq.publish(topic, bodyOf(command), { ttl, single }, (error, info) => {
        done(error, info);
    });
}

const commands = {
    publish(command) {
        publish(command, (error, info) => say({ type: 'published', error: error && String(error), fname: info && info.fname }));
    },

    // Many, one after the other in `lanes`; their bodies are the numbers from `first` on. A line for each.
    many(command) {
        const { topic, count, first, lanes } = command;
        let next = first;
        const lane = () => {
            if (next >= first + count) {
                return;
            }
            const number = next++;
            publish({ ...command, topic, body: String(number) }, error => {
                say({ type: 'published', error: error && String(error), body: String(number) });
                lane();
            });
        };
        for (let i = 0; i < (lanes || 1); i += 1) {
            lane();
        }
    },

    // `fail`: the first so many singles are refused.
    subscribe(command) {
        let failures = command.fail || 0;
        fsq.subscribe(command.topic || '#', (data, info, done) => {
            if (info.single && failures > 0) {
                failures -= 1;
                say({ type: 'refused', body: data.toString() });
                return done(new Error('refused'));
            }
            say({ ...describe(data, info), existing: !!info.existing });
            if (info.single) {
                return done(null, error => say({ type: 'done', body: data.toString(), error: error && String(error) }));
            }
            done();
        }, { subscribe_to_existing: !!command.existing }, () => say({ type: 'subscribed' }));
    },

    // fsq's own reading of a name: the file is put into messages/00, and what its filter is told is the answer.
    parse(command) {
        const fs = require('fs');
        const names = command.names;
        const seen = {};
        fsq.filters.push((info, handlers, next) => {
            const { topic, expires, single, direct } = info;
            seen[info.fname] = { topic, expires, single, direct };
            next(null, true, handlers);
        });
        fsq.subscribe('#', () => {}, { subscribe_to_existing: true });
        for (const name of names) {
            fs.writeFileSync(path.join(options.fsq_dir, 'messages', '00', name), '\0x');
        }
        fsq.force_refresh();
        const wait = setInterval(() => {
            if (Object.keys(seen).length >= command.expected) {
                clearInterval(wait);
                setTimeout(() => say({ type: 'parsed', names: seen }), 0);
            }
        }, 20);
    },

    stop() {
        fsq.stop_watching(() => process.exit(0));
    },
};

readline.createInterface({ input: process.stdin }).on('line', line => {
    const command = JSON.parse(line);
    commands[command.do](command);
}).on('close', () => process.exit(0));
