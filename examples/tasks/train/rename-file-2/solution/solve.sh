#!/bin/bash
mv guest.txt horse.txt
