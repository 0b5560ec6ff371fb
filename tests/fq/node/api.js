// Everything that the client of npm has, step by step; each answer is a line of JSON.
'use strict'
process.noDeprecation = true // it is of the time of `new Buffer`
const FQ = require(process.env.PACKAGES + '/fq')
const FqMessage = require(process.env.PACKAGES + '/fq/lib/message')

const [host, port] = process.argv.slice(2)
const client = new FQ({ host, port: +port, user: 'noder', pass: '', queue: 'npm', queueType: 'mem:public', heartbeat: 50 })
const tell = (step, value) => console.log(JSON.stringify({ step, value }))
const bytes = Buffer.from([0, 255, 10])
let count = 0

const late = 'Have not received heartbeat in too long' // it looks at a clock, on a busy machine
client.on('error', error => error.message === late || tell('error', error.message))
client.on('connect', () => tell('connect', true))
client.on('ready', () => {
  tell('ready', true)
  client.bind('npm', 'prefix:"a." sample(1)', 0, (error, route) => {
    tell('bind', [error, route > 0])
    client.bind('npm', 'nonsense', 0, (error, route) => {
      tell('illegal', [error, route])
      client.bind('npm', 'prefix:"a."', 272, (error, route) => {
        tell('permanent', [error, route > 0])
        client.consume()
        publish()
      })
    })
  })
})

function publish () {
  client.publish({ exchange: 'npm', route: 'a.text', payload: 'täxt' }, error => tell('published', error || null))
  client.publish({ exchange: 'npm', route: Buffer.from('a.bytes'), payload: bytes, msgId: '7'.repeat(16) })
  client.publish({ exchange: 'npm', route: 'b', payload: 'for nobody' })
  client.publish({ exchange: 'none', route: 'b', payload: 'nowhere' })
  const own = new FqMessage()
  own.setMsgId('9'.repeat(16))
  own.setExchange('npm')
  own.setRoute('a.own')
  own.setPayload('x'.repeat(100000))
  client.sendMsg(own, error => tell('sent', error || null))
}

client.on('message', message => {
  tell('message', {
    route: message.getRoute(), sender: message.getSender(), exchange: message.getExchange(), hops: message.getHops(),
    id: message.msgId.toString('hex'), size: message.payload.length, payload: message.payload.toString('hex').slice(0, 40)
  })
  if (++count === 3) client.status((error, status) => { tell('status', [error, status]); beats() })
})

function beats () {
  const first = client.cmdHeartbeat.last
  const wait = setInterval(() => {
    if (String(client.cmdHeartbeat.last) === String(first)) return
    clearInterval(wait)
    tell('beat', true)
    client.setHeartbeat(20)
    client.unbind((error, success) => { tell('unbind', [error, success]); again() })
  }, 5)
}

function again () {
  client.removeAllListeners('ready')
  client.on('ready', () => {
    tell('ready again', true)
    client.shutdown()
    tell('shutdown', true)
    process.exit()
  })
  client.connection.reconnectMs = 1
  client.reset()
}

client.connect()
