/* CRC-32C: by the CPU's instruction where it has one, else by a table; found out at run time. */
#ifndef MQFS_CRC32C_H
#define MQFS_CRC32C_H
#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(hidden)
extern int crc_cpu;

void crc_begin(void); /* before all others */
uint32_t crc_by_table(uint32_t crc, const uint8_t *p, size_t n);
uint32_t crc_by_cpu(uint32_t crc, const uint8_t *p, size_t n);
#pragma GCC visibility pop

static inline uint32_t crc32c(uint32_t crc, const void *data, size_t n)
{
    return ~(crc_cpu ? crc_by_cpu(~crc, data, n) : crc_by_table(~crc, data, n));
}
#endif
